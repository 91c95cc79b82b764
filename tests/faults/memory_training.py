"""Jobs of the script of `training.py` in this process."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jaxfleet.capture import Captured, capture
from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.ir import Program
from jaxfleet.ps.client.client import Client
from jaxfleet.runtime.pserver_job import (
    JobPrograms,
    example_of,
    job_programs,
    membership,
    timeouts_of,
)
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.strategy import DistributedStrategy
from tests.faults import training
from tests.faults.cluster import LOST_S
from tests.faults.memory_jobs import CACHE, NAME, End, MemoryJob


@cache
def captured(kind: str) -> Captured:
    example = (training.start(kind), next(training.batches(1, kind)))
    return capture(training.make_step(kind), example=example)


class TrainingJob(MemoryJob):
    """A job of the training script.

    Args:
        folder: where servers keep checkpoints; needed with `returns_s`.
        options: of the script; `--stop-at` is for trainer 1 alone.
        restored: a checkpoint with which trainers begin.
        saved: where they save one at their end.
        more: see `MemoryJob`.

    Attributes:
        resumes: the script begins with `step.resume`.
        between: what the script does with a state between two steps.
        on_resume: called with what `step.resume` returns, and its trainer.
        steps: of each trainer, the newest.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        options: Sequence[str] = (),
        restored: Path | None = None,
        saved: Path | None = None,
        **more: Any,
    ) -> None:
        super().__init__(folder, **more)
        self.restored, self.saved = restored, saved
        self.args = training.arguments([f"--lost-after={LOST_S}", *options])
        self.strategy = training.strategy(self.args)
        self.trainer_return_s = self.strategy.returns_s
        self.resumes = True
        self.between: Callable[[TrainerStep, Any, int], Any] = lambda _step, state, _number: state
        self.steps: dict[int, TrainerStep] = {}
        self.on_resume: Callable[[int, Any, int], None] = lambda *_: None

    def train(self, trainer: int) -> End:
        args = self.args
        step = TrainerStep(
            captured(args.kind),
            self.strategy,
            programs(args.kind, self.strategy, trainer, self.trainers, self.endpoints),
            partial(self._connect, trainer),
            example=example_of(captured(args.kind), self.strategy, self.trainers),
            cache=CACHE,
        )
        self.steps[trainer] = step
        state: Any = training.start(args.kind)
        with step:
            state, done = step.resume(state) if self.resumes else (state, 0)
            self.on_resume(trainer, state, done)
            if self.restored is not None and not done:
                state = step.restore(self.restored)
            before = 0 if self.restored is None else open_checkpoint(self.restored).step
            for number, batch in enumerate(training.batches(args.steps, args.kind), 1):
                if before + number <= done:
                    continue
                if trainer == 1 and number == args.stop_at:
                    break
                state, _ = step(state, batch)
                self.finished(trainer, number, args.pause)
                state = self.between(step, state, number)
            if self.saved is not None:
                step.save(self.saved, state)
            found = training.named(step.pull(state))
            if args.kind == "count_rows":
                found["rows"] = step.look_up("counted", training.KEYS)
            return End(None, found, step.stats()["trainer"])

    def _connect(self, trainer: int, job: JobPrograms) -> Client:
        me = membership(
            job,
            name=NAME,
            trainer=trainer,
            trainers=self.expected,
            endpoints=self.endpoints,
            life=self.lives[trainer] - 1,
        )
        timeouts = timeouts_of(self.strategy, server_return_s=self.returns_s)
        return self.client(me, timeouts, self.strategy.replay_bytes)


@cache
def programs(
    kind: str,
    strategy: DistributedStrategy,
    trainer: int,
    trainers: int,
    endpoints: tuple[str, ...],
) -> Callable[[Program], JobPrograms]:
    """Returns the programs of a trainer, cached for all jobs."""
    made: dict[str, JobPrograms] = {}

    def make(program: Program) -> JobPrograms:
        if (text := str(program)) not in made:
            first = programs(kind, strategy, 0, trainers, endpoints) if trainer else None
            made[text] = job_programs(
                program,
                strategy,
                trainer=trainer,
                trainers=trainers,
                endpoints=endpoints,
                like=first(program) if first is not None else None,
            )
        return made[text]

    return make
