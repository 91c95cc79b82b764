"""Identity of a trainer, which its hello contains."""

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np

from jaxfleet.ps.membership import Membership
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.consistency import pack_text
from jaxfleet.transport.messages import PROTOCOL, Plain, Tensor


@dataclass(frozen=True)
class TrainerIdentity:
    """Identity of a trainer and of its job.

    Attributes:
        program: hash of the program that all trainers run.
        programs: each server's program as text, with the values of its constants; empty if servers
            load their own programs.
        text: text of the trainers' program, to show where another differs.
        session: distinguishes this process from a replacement.
        life: how often a process with this number was started again before this one.
        membership: the members of the job, once they have changed.
        goes_on: the others go on without a lost trainer.
        fixed: why the members of the job cannot change; empty if they can.
        leaves: a SIGTERM lets this trainer leave the job.
        is_sync: trainers wait for each other at every step of the client.
        former: its number among the members before; None if it was none of them.
        former_epoch: of those members.
        done: the last step that it did as that.
        has_begun: all servers have greeted it among the present members.
        has_moved: with all trainers, from other servers, whose state is in a checkpoint.
    """

    job: str
    trainer: int
    trainers: int
    endpoints: tuple[str, ...]
    program: str
    programs: Sequence[tuple[str, Mapping[str, np.ndarray]]] = field(repr=False)
    text: str = field(default="", repr=False)
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    life: int = 0
    membership: Membership = field(default_factory=Membership, repr=False)
    goes_on: bool = False
    fixed: str = "it is no job of jf.distribute"
    leaves: bool = False
    is_sync: bool = True
    former: int | None = None
    former_epoch: int | None = None
    done: int | None = None
    has_begun: bool = False
    has_moved: bool = False

    @property
    def name(self) -> str:
        return f"trainer {self.trainer}"

    def server_name(self, server: int) -> str:
        """Returns the name of a server in errors: `server 0 at 10.0.0.1:6174`."""
        return f"server {server} at {self.endpoints[server]}"

    def packed_text(self) -> Sequence[Tensor]:
        packed = pack_text(self.text) if self.text else None
        return () if packed is None else (Tensor("program", packed),)

    def hello(self, timeouts: Timeouts, step: int = 0) -> dict[str, Plain]:
        """Returns the body of a hello at a step."""
        return {
            "protocol": PROTOCOL,
            "job": self.job,
            "trainer": self.trainer,
            "trainers": self.trainers,
            "servers": list(self.endpoints),
            "program": self.program,
            "defines": bool(self.programs),
            "session": self.session,
            "life": self.life,
            "step": step,
            "versions": versions(),
            "lost_after_s": timeouts.lost_after_s,
            "step_timeout_s": timeouts.step_timeout_s,
            "trainer_return_s": timeouts.trainer_return_s,
            "goes_on": self.goes_on,
            "fixed": self.fixed,
            "leaves": self.leaves,
            "former": self.former,
            "former_epoch": self.former_epoch,
            "done": self.done,
            "has_begun": self.has_begun,
            "has_moved": self.has_moved,
            **self.membership.plain(),
        }


@functools.cache
def versions() -> str:
    """Returns the versions that affect programs and results: `jaxfleet 0.2, jax 0.9`."""
    found = []
    for name in ("jaxfleet", "jax"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} of unknown version")
    return ", ".join(found)
