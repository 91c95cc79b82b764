"""The place of a process in a simulated job whose trainers or servers change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.joining import join_job
from jaxfleet.ps.membership import Membership
from jaxfleet.runtime.pserver_job import JobPrograms
from jaxfleet.runtime.trainer_batches import Programs
from jaxfleet.testing.simulation.workload import CONNECT_S, NAME, Mode, programs_of
from jaxfleet.transport.messages import Connections


@dataclass
class Place:
    """Makes what a process needs for another place in its job, as `runtime.job_places` does.

    Attributes:
        joins: it is no trainer of the job yet.
        endpoints: of the servers that the job has now.
        connect_as: returns the client of a member, at some servers.
        lines: returns connections to servers without a client.
    """

    mode: Mode
    joins: bool
    endpoints: tuple[str, ...]
    connect_as: Callable[[JobPrograms, Membership, str, tuple[str, ...]], Client]
    lines: Callable[[Sequence[str]], Connections]
    clock: Callable[[], float]

    def move_to(self, endpoints: tuple[str, ...]) -> None:
        self.endpoints = endpoints

    def programs(self, trainer: int, trainers: int) -> Programs:
        return programs_of(self.mode, trainer, trainers, self.endpoints)

    def connect(self, job: JobPrograms, membership: Membership, session: str) -> Client:
        return self.connect_as(job, membership, session, self.endpoints)

    def join(self, session: str, digest: Callable[[int], str]) -> Membership | None:
        lines = self.lines(self.endpoints)
        try:
            return join_job(
                lines, job=NAME, session=session, digest=digest,
                clock=self.clock, connect_s=CONNECT_S, take_servers=self.move_to,
            )  # fmt: skip
        finally:
            lines.close()
