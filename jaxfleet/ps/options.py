"""Deadlines and sizes that trainers and servers of a job agree on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long who waits for whom.

    Attributes:
        lost_after_s: seconds without a heartbeat after which a peer is lost.
        step_timeout_s: seconds that a living peer may take over what is waited for.
        server_return_s: seconds that trainers wait for a server that went, to be started again.
        connect_s: seconds that trainers wait for servers to answer for the first time.
    """

    lost_after_s: float = 10.0
    step_timeout_s: float = 600.0
    server_return_s: float = 0.0
    connect_s: float = 120.0
