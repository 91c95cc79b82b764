"""Places of a process in its job: as the environment says, and as the job says when it changes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic

from jaxfleet.env import PserverRole, has_job_ended
from jaxfleet.observability import spans_of
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.connected_client import connected_client, job_heartbeat
from jaxfleet.ps.client.joining import STRANGER, join_job
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.server.process import job_network
from jaxfleet.runtime.pserver_job import JobPrograms, membership, programs_for, timeouts_of
from jaxfleet.runtime.trainer_batches import Programs
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.transport.buffers import keep_freed_memory


@dataclass
class JobPlaces:
    """Makes programs and clients for the places that a trainer's process has in its job.

    Attributes:
        cluster: its first place.
        endpoints: of the servers that the job has now.
    """

    cluster: PserverRole
    strategy: DistributedStrategy
    endpoints: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.endpoints = self.cluster.endpoints

    def move_to(self, endpoints: tuple[str, ...]) -> None:
        self.endpoints = endpoints

    @property
    def joins(self) -> bool:
        return self.cluster.joins

    def first(self, job: JobPrograms) -> Client:
        """Returns the client of the trainer that the environment says."""
        trainer = self.cluster.trainer_id
        assert trainer is not None
        return self._client(self._identity(job, trainer, self.cluster.trainers))

    def programs(self, trainer: int, trainers: int) -> Programs:
        return programs_for(
            self.strategy, trainer=trainer, trainers=trainers, endpoints=self.endpoints
        )

    def connect(self, job: JobPrograms, members: Membership, session: str) -> Client:
        number = members.number_of(session)
        assert number is not None
        me = self._identity(job, number, len(members.sessions))
        return self._client(replace(me, membership=members, session=session))

    def join(self, session: str, digest: Callable[[int], str]) -> Membership | None:
        cluster = self.cluster
        assert cluster.trainer_id is not None
        network = job_network(cluster.secret_file)
        lines = network.connect(cluster.endpoints)
        heartbeat = job_heartbeat(  # while this process transpiles
            network, cluster.endpoints, sender=STRANGER, session=session,
            lost_s=self.strategy.lost_after_s,
        )  # fmt: skip
        try:
            return join_job(
                lines,
                job=cluster.job,
                session=session,
                digest=digest,
                clock=monotonic,
                connect_s=self.strategy.connect_s,
                silent_s=self.strategy.lost_after_s + cluster.server_return_s,
                begins=cluster.restart > 0 and cluster.trainer_id < cluster.trainers,
                take_servers=self.move_to,
                has_ended=has_job_ended,
            )
        finally:
            heartbeat.close()
            lines.close()

    def _identity(self, job: JobPrograms, trainer: int, trainers: int) -> TrainerIdentity:
        cluster = self.cluster
        return membership(
            job,
            name=cluster.job,
            trainer=trainer,
            trainers=trainers,
            endpoints=self.endpoints,
            life=cluster.restart,
        )

    def _client(self, me: TrainerIdentity) -> Client:
        keep_freed_memory()
        returns = self.cluster.server_return_s
        return connected_client(
            job_network(self.cluster.secret_file),
            me,
            timeouts_of(self.strategy, server_return_s=returns),
            replay_bytes=self.strategy.replay_bytes if returns else 0,
            spans=spans_of(me.name),
        )
