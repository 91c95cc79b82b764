"""Who takes part in a job, and which of them this process is."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.fleet.meeting.meeting import GroupName


@dataclass(frozen=True)
class Roster:
    """Holds the processes of a job by name, as errors say them.

    Attributes:
        workers: the workers' endpoints; empty texts where none is known.
        servers: the servers' endpoints.
        is_worker: whether this process is a worker.
        index: which worker, or which server, this one is.
    """

    workers: Sequence[str]
    servers: Sequence[str]
    is_worker: bool
    index: int

    @property
    def group(self) -> GroupName:
        """The group of those who do what this process does."""
        return "trainer" if self.is_worker else "pserver"

    @property
    def rank(self) -> int:
        """The process's place among all: workers come first."""
        return self.rank_in("all")

    def members(self, group: GroupName) -> tuple[str, ...]:
        """Returns the names of a group's processes, in their order."""
        workers, servers = _named("trainer", self.workers), _named("pserver", self.servers)
        return {"trainer": workers, "pserver": servers, "all": workers + servers}[group]

    def rank_in(self, group: GroupName) -> int:
        """Returns this process's place in a group that it belongs to."""
        if group not in {"all", self.group}:
            raise AssertionError(f"this process is no {group}")
        before = 0 if group != "all" or self.is_worker else len(self.workers)
        return before + self.index


def _named(kind: str, endpoints: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"{kind} {at} ({one})" if one else f"{kind} {at}" for at, one in enumerate(endpoints)
    )
