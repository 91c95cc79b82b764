"""What a server is told before any trainer comes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxfleet.errors import StrategyError
from jaxfleet.ps.messages import Plain


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Says which job a server serves, how long it waits, and where it keeps its state.

    Attributes:
        server: its number among the servers; found by its endpoint unless given.
        job: the job's name; the first trainer's unless given.
        trainers: how many there are; as the first says unless given.
        lost_after_s: who is not heard of for so long is lost.
        step_timeout_s: the longest that anyone waits for a peer that lives.
        as_trainers_say: take both of these from the first trainer's hello instead.
        server_return_s: how much longer another server may be silent, which may be started again.
        trainer_return_s: how long it stays where all trainers that came are lost, for others in
            their place; as long as `step_timeout_s` unless given.
        heartbeat_s: how often it tells other servers that it lives.
        queued_bytes: the most bytes of gradients for later steps that it holds.
        checkpoint_dir: where it keeps its own checkpoints, in `server<i>`; none unless given.
        save_dirs: the folders below which trainers may have it write and read checkpoints; None is
            any folder, for servers that no other process reaches.
        keep: how many of its own checkpoints it keeps.
        may_leave: a trainer may end before the others, who go on without it.

    Raises:
        StrategyError: a time is not positive.
    """

    server: int | None = None
    job: str | None = None
    trainers: int | None = None
    lost_after_s: float = 10.0
    step_timeout_s: float = 600.0
    as_trainers_say: bool = False
    server_return_s: float = 0.0
    trainer_return_s: float | None = None
    heartbeat_s: float = 1.0
    queued_bytes: int = 8 << 30
    checkpoint_dir: Path | None = None
    save_dirs: tuple[Path, ...] | None = None
    keep: int = 2
    may_leave: bool = False

    def __post_init__(self) -> None:
        for name in ("lost_after_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                what = f"a server's {name} is {getattr(self, name)}"
                raise StrategyError(what, hint="it is a positive number of seconds")

    def after_hello(self, body: Mapping[str, Plain]) -> "ServerOptions":
        """Returns the options once the first trainer has said how patient the job is."""
        if not self.as_trainers_say:
            return self
        lost, timeout = body.get("lost_after_s"), body.get("step_timeout_s")
        return replace(
            self,
            lost_after_s=_seconds(lost, self.lost_after_s),
            step_timeout_s=_seconds(timeout, self.step_timeout_s),
            as_trainers_say=False,
        )


def _seconds(value: Plain, default: float) -> float:
    """Returns a number of seconds that a message holds, the default where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return float(value) if 0 < value < math.inf else default
