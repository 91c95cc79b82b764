"""A simulated trainer: one process that runs the script."""

from dataclasses import dataclass, replace
from pathlib import Path

from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.membership import Membership
from jaxfleet.runtime.pserver_job import JobPrograms, membership, timeouts_of
from jaxfleet.testing.simulation import workload
from jaxfleet.testing.simulation.network import ProcessNetwork
from jaxfleet.testing.simulation.place import Place
from jaxfleet.testing.simulation.run import Run
from jaxfleet.testing.simulation.schedule import RETURNS_S, Schedule
from jaxfleet.testing.simulation.scheduler import Process, Scheduler
from jaxfleet.testing.simulation.watch import WatchedClient


@dataclass
class TrainerProcess:
    """A trainer of a schedule.

    Attributes:
        life: how often it was started before.
        endpoints: of the servers that the job has when it starts.
        result: where its waits are noted.
    """

    process: Process
    trainer: int
    life: int
    schedule: Schedule
    endpoints: tuple[str, ...]
    scheduler: Scheduler
    network: ProcessNetwork
    result: Run

    def train(self, record: workload.Record, folder: Path, leaves_after: int | None) -> None:
        """Runs the script, and leaves the job after a step, if given."""
        mode = self.schedule.mode
        pace_s = self.schedule.pace_s[self.trainer % workload.TRAINERS]
        place = Place(
            mode,
            joins=self.trainer >= workload.TRAINERS,
            endpoints=self.endpoints,
            connect_as=self._connect_as,
            lines=self.network.connect,
            clock=self.scheduler.clock,
        )
        workload.train(
            mode,
            self.trainer,
            lambda job: self._connect(job, place.endpoints),
            record,
            pause=lambda _: self.scheduler.sleep(pace_s),
            folder=folder,
            scaling=place if mode.changes or mode.moves else None,
            leaves_after=leaves_after,
        )

    def _connect(self, job: JobPrograms, endpoints: tuple[str, ...]) -> Client:
        me = self._identity(job, self.trainer, workload.TRAINERS, endpoints)
        return self._client(replace(me, life=self.life))

    def _connect_as(
        self, job: JobPrograms, members: Membership, session: str, endpoints: tuple[str, ...]
    ) -> Client:
        number = members.number_of(session)
        assert number is not None
        me = self._identity(job, number, len(members.sessions), endpoints)
        return self._client(replace(me, membership=members, session=session))

    def _identity(
        self, job: JobPrograms, trainer: int, trainers: int, endpoints: tuple[str, ...]
    ) -> TrainerIdentity:
        return membership(
            job, name=workload.NAME, trainer=trainer, trainers=trainers, endpoints=endpoints
        )

    def _client(self, me: TrainerIdentity) -> Client:
        returns_s = RETURNS_S if self.schedule.keeps_checkpoints else 0.0
        strategy = workload.strategy_of(self.schedule.mode)
        timeouts = timeouts_of(strategy, server_return_s=returns_s)
        clock = self.scheduler.clock
        beats = Heartbeat(
            self.network,
            me.endpoints,
            sender=me.name,
            session=me.session,
            every_s=min(1.0, timeouts.lost_after_s / 5),
            clock=clock,
            thread=False,
        )
        self.scheduler.start(self.process, f"heartbeat {self.process.name}", beats.run)
        client = WatchedClient(
            self.network.connect(me.endpoints),
            me,
            timeouts=timeouts,
            heartbeat=beats,
            replay_bytes=workload.REPLAY_BYTES if returns_s else 0,
            clock=clock,
        )
        result = self.result
        client.watch(result.waits, result.sizes, result.unsaved, self.scheduler)
        return client
