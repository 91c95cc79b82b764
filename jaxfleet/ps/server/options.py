"""Options and identity of a server, and the folders that its peers may name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxfleet.errors import StrategyError
from jaxfleet.ps.server.outbox import RequestError
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Kind, Message, Plain

_LONGEST_PATH = 300  # characters of a path shown in an error


@dataclass
class ServerIdentity:
    """Identity of a server; trainers specify its job.

    Attributes:
        incarnation: distinguishes this process from its predecessor.
        text: that program's packed text, for the next restart; None if unknown.
        epoch: number of changes of the job's trainers, to the last one that has begun.
    """

    incarnation: str = ""
    job: str = ""
    program: str = ""
    text: np.ndarray | None = None
    epoch: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server: its job, timeouts, and checkpoints.

    Attributes:
        server: number of the server; found by its endpoint by default.
        job: the job's name; the first trainer's by default.
        launch_id: distinguishes launches of the job, for a server restarted after all trainers have
            left: in the same launch it ends, in another it serves.
        trainers: number of trainers; as the first trainer reports by default.
        lost_after_s: silence after which a peer is lost.
        step_timeout_s: maximum wait for a live peer.
        connect_s: how long the server waits for the first trainer, unless `step_timeout_s` is more.
        goes_on: the others go on without a lost trainer; as the first trainer reports by default.
        as_trainers_say: take `lost_after_s` and `step_timeout_s` from the first trainer's hello.
        server_return_s: additional silence allowed to another server, which may be restarted.
        trainer_return_s: how long the trainers wait for a lost one to return, and the server if all
            are lost; the first trainer's by default. None: the loss of one is an error for the
            others, and a server whose trainers are all lost waits `step_timeout_s`.
        heartbeat_s: interval of heartbeats to other servers.
        queued_bytes: maximum bytes of queued gradients for later steps, and of the trainers' own
            state.
        checkpoint_dir: folder of its recovery checkpoints, in `server<i>`; none by default.
        save_dirs: folders below which trainers may have it write and read checkpoints; None allows
            any folder, for servers that no other process reaches.
        keep: number of recovery checkpoints kept.
        may_leave: a trainer may end before the others, which continue without it.

    Raises:
        StrategyError: a time is not positive.
    """

    server: int | None = None
    job: str | None = None
    launch_id: str | None = None
    trainers: int | None = None
    lost_after_s: float = Timeouts.lost_after_s
    step_timeout_s: float = Timeouts.step_timeout_s
    connect_s: float = Timeouts.connect_s
    as_trainers_say: bool = False
    server_return_s: float = 0.0
    trainer_return_s: float | None = None
    heartbeat_s: float = 1.0
    queued_bytes: int = 8 << 30
    checkpoint_dir: Path | None = None
    save_dirs: tuple[Path, ...] | None = None
    keep: int = 2
    may_leave: bool = False
    goes_on: bool = False

    def __post_init__(self) -> None:
        for name in ("lost_after_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                what = f"a server's {name} is {getattr(self, name)}"
                raise StrategyError(what, hint="it is a positive number of seconds")

    def after_hello(self, body: Mapping[str, Plain]) -> "ServerOptions":
        """Returns the options with the timeouts of the first trainer's hello."""
        if body.get("goes_on") is True and not self.goes_on:
            return replace(self, goes_on=True).after_hello(body)
        returns_s = _seconds(body.get("trainer_return_s"), 0.0) or None
        if self.trainer_return_s is None and returns_s is not None:
            return replace(self, trainer_return_s=returns_s).after_hello(body)
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
    """Returns a number of seconds from a message, the default if invalid."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return float(value) if 0 < value < math.inf else default


@dataclass(frozen=True)
class SaveFolders:
    """Checks paths in messages.

    The folders come from the server's own configuration, never from a peer; None allows any path,
    for servers that no other process reaches. Symbolic links are resolved before the comparison.

    Attributes:
        roots: folders that a user has allowed.
        moving: through which the state goes to other servers, None if there is none.
    """

    roots: tuple[Path, ...] | None = None
    moving: Path | None = None

    def check(self, message: Message) -> None:
        """Rejects a message that names a folder outside all of these.

        It is the `path`, the nonempty `refill`, or the folder that a move goes through.
        """
        path, refill = message.body.get("path"), message.body.get("refill")
        verb = "write" if message.kind in {Kind.SAVE, Kind.MOVE} else "read"
        for each in path, message.body.get("moves_through"):
            if isinstance(each, str):
                self._check_path(each, verb)
        if isinstance(refill, str) and refill:
            self._check_path(refill, verb)

    def _check_path(self, path: str, verb: str) -> None:
        if self.roots is None:
            return
        try:
            found = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null byte
            what = f"the path {path!r:.{_LONGEST_PATH}} cannot be used: {error}"
            raise RequestError("bad_message", what) from error
        own = () if self.moving is None else (self.moving,)
        if any(found.is_relative_to(root.resolve()) for root in (*self.roots, *own)):
            return
        folders = ", ".join(map(str, self.roots))
        what = f"servers {verb} checkpoints below {folders} alone, not {path:.{_LONGEST_PATH}}"
        hint = "allow the folder when the job starts: jaxfleet launch --save-dir DIR, or set"
        raise RequestError("checkpoint", what, hint=f"{hint} JAXFLEET_SAVE_DIR for servers")
