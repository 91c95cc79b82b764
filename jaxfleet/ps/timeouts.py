"""Timeouts of a job: how long its trainers and servers wait for each other."""

from dataclasses import dataclass

from jaxfleet.strategy import DistributedStrategy


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of trainers and servers.

    Attributes:
        lost_after_s: seconds without a heartbeat after which a peer is lost.
        step_timeout_s: maximum seconds to wait for a live peer.
        server_return_s: seconds that trainers wait for a lost server to be restarted.
        connect_s: seconds that trainers wait for the first reply of the servers.
        trainer_return_s: seconds that the others wait for a lost trainer to return; None if its
            loss is an error at once.
    """

    lost_after_s: float = DistributedStrategy.lost_after_s
    step_timeout_s: float = DistributedStrategy.step_timeout_s
    server_return_s: float = 0.0
    connect_s: float = DistributedStrategy.connect_s
    trainer_return_s: float | None = None
