"""Jobs of the training script whose trainers change while they run."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.joining import join_job
from jaxfleet.ps.membership import Membership
from jaxfleet.runtime.pserver_job import JobPrograms, example_of, membership, timeouts_of
from jaxfleet.runtime.trainer_batches import Programs
from jaxfleet.runtime.trainer_membership import Departure
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.strategy import DistributedStrategy
from tests.faults import training
from tests.faults.memory_jobs import CACHE, NAME, End, MemoryJob, StoppingNetwork
from tests.faults.memory_training import TrainingJob, captured, programs


class ChangingJob(TrainingJob):
    """A job of the training script whose processes may leave, be lost, and join.

    Args:
        joins_at_s: when each process begins that is not one of the first trainers.
        more: see `TrainingJob`.

    Attributes:
        steps: the steps of all processes, by number.
        joining_kind: what those train, by default as all.
        joins_by_resume: those begin with `step.resume`, as they must.
        computed: the steps that each process has computed, with the number of trainers then.
    """

    def __init__(self, *, joins_at_s: tuple[float, ...] = (), **more: Any) -> None:
        super().__init__(**more)
        self.joins_at_s, self.beating = joins_at_s, 2
        self.joining_kind, self.joins_by_resume = self.args.kind, True
        self.trainers += len(joins_at_s)
        self.lives += [0] * len(joins_at_s)
        self.steps: dict[int, TrainerStep] = {}
        self.computed: dict[int, list[tuple[int, int]]] = {}

    def train(self, trainer: int) -> End:
        joins = trainer >= self.expected
        kind, count = self.joining_kind if joins else self.args.kind, self.expected
        scaling = MemoryScaling(self, trainer, kind, self.strategy, joins=joins)
        if joins:
            self.network.sleep(self.joins_at_s[trainer - self.expected])
        step = self.steps[trainer] = TrainerStep(
            captured(kind),
            self.strategy,
            scaling.programs(min(trainer, count - 1), count),
            partial(self._connect, trainer),
            example=example_of(captured(kind), self.strategy, count),
            cache=CACHE,
            scaling=scaling,
        )
        try:
            return self._run_script(trainer, step)
        except Departure:
            return End()

    def _run_script(self, trainer: int, step: TrainerStep) -> End:
        args, computed = self.args, self.computed.setdefault(trainer, [])
        with step:
            state, done = training.start(args.kind), 0
            if trainer < self.expected or self.joins_by_resume:
                state, done = step.resume(state)
            self.on_resume(trainer, state, done)
            for number, batch in enumerate(training.batches(args.steps, args.kind), 1):
                if number <= done:
                    continue
                state, _ = step(state, batch)
                computed.append((number, step.client.me.trainers))
                self.finished(trainer, number, args.pause)
                state = self.between(step, state, number)
            found = training.named(step.pull(state)) | training.rows_of(step, args.kind)
            return End(None, found, step.stats()["trainer"])

    def survivors(self) -> list[dict[str, np.ndarray]]:
        """Returns the final states of the trainers that saw the end of the job."""
        for name, end in self.ends.items():
            assert end.error is None, f"{name} ended with {end.error!r}"
        return [end.state for name, end in self.ends.items() if end.state]

    def counts(self) -> list[int]:
        """Returns by how many trainers each step was computed; fails if they disagree."""
        found: dict[int, set[int]] = {}
        for computed in self.computed.values():
            for number, count in computed:
                found.setdefault(number, set()).add(count)
        assert all(len(counts) == 1 for counts in found.values()), found
        return [found[number].pop() for number in sorted(found)]


def changes(counts: Iterable[int]) -> list[int]:
    """Returns the numbers of trainers or servers that a job had, one after the other."""
    return [number for number, _ in itertools.groupby(counts)]


def leave_all_but_one_of_four(job: ChangingJob) -> None:
    """Lets all but trainer 2 leave a job of four trainers, after step 8 at the earliest."""

    def between(step: TrainerStep, state: Any, done: int) -> Any:
        me = step.client.me
        if me.trainers == 4 and done >= 8 and me.trainer != 2:
            step.leave()
        return state

    job.between = between


@dataclass
class MemoryScaling:
    """Other places of a process in a job in memory, which trains one kind of step."""

    job: MemoryJob
    process: int
    kind: str
    strategy: DistributedStrategy
    joins: bool
    endpoints: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.endpoints = self.job.endpoints

    def move_to(self, endpoints: tuple[str, ...]) -> None:
        self.endpoints = endpoints

    def programs(self, trainer: int, trainers: int) -> Programs:
        return programs(self.kind, self.strategy, trainer, trainers, self.endpoints)

    def connect(self, job: JobPrograms, members: Membership, session: str) -> Client:
        number = members.number_of(session)
        assert number is not None
        me = membership(
            job,
            name=NAME,
            trainer=number,
            trainers=len(members.sessions),
            endpoints=self.endpoints,
        )
        me = replace(me, membership=members, session=session)
        timeouts = timeouts_of(self.strategy, server_return_s=self.job.returns_s)
        return self.job.client(me, timeouts, self.strategy.replay_bytes, self.process)

    def join(self, session: str, digest: Callable[[int], str]) -> Membership | None:
        network = StoppingNetwork(self.job, f"trainer {self.process}", self.process)
        lines = network.connect(self.job.endpoints)
        try:
            return join_job(
                lines,
                job=NAME,
                session=session,
                digest=digest,
                clock=self.job.network.clock,
                connect_s=self.strategy.connect_s,
                take_servers=self.move_to,
            )
        finally:
            lines.close()
