"""The rendezvous protocol: barrier, gather and reduction among a roster of processes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxfleet.errors import ClosedError
from jaxfleet.observability import LongWait

GroupName = Literal["trainer", "pserver", "all"]


class Rendezvous(Protocol):
    """Gathers values of a job's processes; a gather waits for every process of the group."""

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        """Returns the values of all processes of a group, in order: workers, then servers.

        Args:
            group: the group; this process belongs to it.
            value: this process's value.
            what: purpose of the gather, the same in all processes; errors name it.

        Raises:
            ConnectError: a process never arrived.
            PeerLostError: a process that had arrived did not join this gather.
        """
        ...

    def close(self) -> None:
        """Leaves the rendezvous; idempotent."""
        ...


def left_error(what: str) -> ClosedError:
    """Returns the error of a gather after `close`."""
    hint = "barriers and sums of workers come before fleet.stop_worker()"
    return ClosedError(f"{what}: this process has left the others", hint=hint)


class SingleProcess:
    """Rendezvous of a process that is alone in its group."""

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        del group, what
        return [value]

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Roster:
    """The processes of a job, by the names that errors use."""

    workers: Sequence[str]  # the workers' endpoints; empty strings if unknown
    servers: Sequence[str]  # the servers' endpoints
    is_worker: bool
    index: int  # index of this process among the workers or servers

    @property
    def group(self) -> GroupName:
        """The group of the processes with this process's role."""
        return "trainer" if self.is_worker else "pserver"

    @property
    def rank(self) -> int:
        """The process's rank in the job: workers come first."""
        return self.rank_in("all")

    def members(self, group: GroupName) -> tuple[str, ...]:
        """Returns the names of a group's processes, in rank order."""
        workers, servers = _named("trainer", self.workers), _named("pserver", self.servers)
        return {"trainer": workers, "pserver": servers, "all": workers + servers}[group]

    def rank_in(self, group: GroupName) -> int:
        if group not in {"all", self.group}:
            raise AssertionError(f"this process is no {group}")
        before = 0 if group != "all" or self.is_worker else len(self.workers)
        return before + self.index


def _named(kind: str, endpoints: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"{kind} {at} ({one})" if one else f"{kind} {at}" for at, one in enumerate(endpoints)
    )


_FIRST_S, _LONGEST_S = 0.001, 0.1


@dataclass
class Poll:
    """Polls with growing intervals until a deadline."""

    seconds: float

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._pause_s = _FIRST_S
        self._wait = LongWait()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def pause(self, describe: Callable[[], str]) -> None:
        self._wait.look(describe)
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_S)
