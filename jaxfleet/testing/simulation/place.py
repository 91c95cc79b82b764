"""The place of a process in a simulated job whose trainers change."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxfleet.errors import StrategyError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.joining import join_job
from jaxfleet.ps.membership import Membership
from jaxfleet.runtime.pserver_job import JobPrograms
from jaxfleet.runtime.trainer_batches import Programs
from jaxfleet.testing.simulation.workload import CONNECT_S, NAME, Mode, programs_of
from jaxfleet.transport.messages import Connections


@dataclass(frozen=True)
class Place:
    """Makes what a process needs for another place in its job.

    Attributes:
        joins: it is no trainer of the job yet.
        connect_as: returns the client of a member.
        lines: returns connections without a client.
    """

    mode: Mode
    joins: bool
    connect_as: Callable[[JobPrograms, Membership, str], Client]
    lines: Callable[[], Connections]
    clock: Callable[[], float]

    def move_to(self, endpoints: tuple[str, ...]) -> None:
        what = f"a simulated job keeps its servers, and is to move to {', '.join(endpoints)}"
        raise StrategyError(what, hint="add or remove servers of a job that jaxfleet launch runs")

    def programs(self, trainer: int, trainers: int) -> Programs:
        return programs_of(self.mode, trainer, trainers)

    def connect(self, job: JobPrograms, membership: Membership, session: str) -> Client:
        return self.connect_as(job, membership, session)

    def join(self, session: str, digest: Callable[[int], str]) -> Membership | None:
        lines = self.lines()
        try:
            return join_job(
                lines, job=NAME, session=session, digest=digest,
                clock=self.clock, connect_s=CONNECT_S,
            )  # fmt: skip
        finally:
            lines.close()
