"""Who a trainer is, and what it says of its job when it says hello."""

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np

from jaxfleet.ps.job_text import pack_text
from jaxfleet.ps.messages import PROTOCOL, Plain, Tensor
from jaxfleet.ps.options import Patience


@dataclass(frozen=True)
class Membership:
    """Who a trainer is, and what the job runs.

    Attributes:
        job: the job's name.
        trainer: which trainer this is.
        trainers: how many there are.
        endpoints: of the servers.
        program: the hash of what all trainers run.
        programs: each server's program as text, with the values of its constants; none where
            servers begin with programs of their own.
        text: that of what all trainers run, to show where another's differs.
        session: tells this process from another that takes its place.
    """

    job: str
    trainer: int
    trainers: int
    endpoints: tuple[str, ...]
    program: str
    programs: Sequence[tuple[str, Mapping[str, np.ndarray]]] = field(repr=False)
    text: str = field(default="", repr=False)
    session: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def name(self) -> str:
        """The trainer's: `trainer 0`."""
        return f"trainer {self.trainer}"

    def server_name(self, server: int) -> str:
        """Returns what a server is called in errors: `server 0 at 10.0.0.1:6174`."""
        return f"server {server} at {self.endpoints[server]}"

    def packed_text(self) -> Sequence[Tensor]:
        """Returns what travels with the first hello: the text, where there is one."""
        packed = pack_text(self.text) if self.text else None
        return () if packed is None else (Tensor("program", packed),)

    def hello(self, patience: Patience) -> dict[str, Plain]:
        """Returns the body of a hello."""
        return {
            "protocol": PROTOCOL,
            "job": self.job,
            "trainer": self.trainer,
            "trainers": self.trainers,
            "servers": list(self.endpoints),
            "program": self.program,
            "defines": bool(self.programs),
            "session": self.session,
            "versions": versions(),
            "lost_after_s": patience.lost_after_s,
            "step_timeout_s": patience.step_timeout_s,
        }


@functools.cache
def versions() -> str:
    """Returns the versions that programs and their results depend on: `jaxfleet 0.2, jax 0.9`."""
    found = []
    for name in ("jaxfleet", "jax"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} of unknown version")
    return ", ".join(found)
