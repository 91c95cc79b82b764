"""Jobs in this process whose trainers lease samples, with an oracle that counts each sample.

A parameter has an element for each sample, and a step adds 1 to those of its batch: the values on a
server are how often it applied each sample.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from jaxfleet.capture import Captured, capture
from jaxfleet.data import Loader
from jaxfleet.env import PeriodicSaves
from jaxfleet.ps.client.client import Client
from jaxfleet.runtime.pserver_job import example_of, membership, timeouts_of
from jaxfleet.runtime.trainer_membership import Departure
from jaxfleet.runtime.trainer_step import TrainerStep
from tests.faults.changing_jobs import MemoryScaling
from tests.faults.cluster import LOST_S
from tests.faults.memory_jobs import CACHE, NAME, End, MemoryJob
from tests.faults.memory_training import programs

SAMPLES = 48
ROWS = 2  # of a trainer's batch


@cache
def captured(samples: int) -> Captured:
    tx = jf.distributed_optimizer(optax.sgd(1.0))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt = state

        def loss_fn(counts: jax.Array) -> jax.Array:
            return -(jax.nn.one_hot(batch, samples) @ counts).sum()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return capture(train_step, example=(start(samples), np.zeros(ROWS, np.int32)))


def start(samples: int) -> Any:
    counts = jnp.zeros(samples)
    return counts, optax.sgd(1.0).init(counts)


class LeasingJob(MemoryJob):
    """A job whose script trains on a loader's leased batches.

    Args:
        folder: where servers keep checkpoints; needed with `returns_s`.
        epochs: of the loader.
        samples: of the source.
        batch_size: of the whole job.
        restored: a checkpoint with which trainers begin.
        saved: where they save one at their end.
        saves: checkpoints that steps write by themselves.
        pauses: seconds that a step of each trainer takes.
        strategy: options.
        joins_at_s: when each process begins that is not one of the first trainers.
        changes: trainers may leave, be lost and join.
        more: see `MemoryJob`.

    Attributes:
        took: the batches of each trainer, in order.
        skipped: batches that a trainer takes and does not train on, by trainer and number.
        steps: the steps of all processes, by number.
        numbers: how many trainers each process has had, one after the other.
        after_step: called with a trainer, the number of its batches, the step and the state.
        data: what the server reported at the end.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        epochs: int = 1,
        samples: int = SAMPLES,
        batch_size: int | None = None,
        restored: Path | None = None,
        saved: Path | None = None,
        pauses: Sequence[float] = (0.1, 0.1, 0.1),
        saves: PeriodicSaves | None = None,
        strategy: dict[str, Any] | None = None,
        joins_at_s: tuple[float, ...] = (),
        changes: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(folder, **more)
        self.joins_at_s, self.changes = joins_at_s, changes or bool(joins_at_s)
        self.beating += self.changes
        self.trainers += len(joins_at_s)
        self.lives += [0] * len(joins_at_s)
        self.steps: dict[int, TrainerStep] = {}
        self.numbers: dict[int, list[int]] = {n: [] for n in range(self.trainers)}
        self.epochs, self.samples, self.restored, self.saved = epochs, samples, restored, saved
        self.batch_size = batch_size or ROWS * self.expected
        self.pauses = pauses
        options = {
            "communication": "async", "staleness": 3, "batch": "local", **(strategy or {})
        }  # fmt: skip
        self.strategy = jf.DistributedStrategy(
            mode="pserver", min_block_size=8, lost_after_s=LOST_S,
            step_timeout_s=self.step_s, **options,
        )  # fmt: skip
        self.trainer_return_s = self.strategy.returns_s
        self.took: dict[int, list[list[int]]] = {n: [] for n in range(self.trainers)}
        self.saves = saves
        self.skipped: set[tuple[int, int]] = set()
        self.after_step: Callable[[int, int, Any, Any], Any] = lambda _t, _n, _step, state: state
        self.data: dict[str, Any] = {}

    def train(self, trainer: int) -> End:
        joins, count, kind = trainer >= self.expected, self.expected, f"leases {self.samples}"
        if joins:
            self.network.sleep(self.joins_at_s[trainer - count])
        place = min(trainer, count - 1)
        step: Any = TrainerStep(
            captured(self.samples),
            self.strategy,
            programs(kind, self.strategy, place, count, self.endpoints),
            partial(self._connect, trainer),
            example=example_of(captured(self.samples), self.strategy, count),
            cache=CACHE,
            scaling=MemoryScaling(self, trainer, kind, self.strategy, joins=joins)
            if self.changes
            else None,
        )
        self.steps[trainer] = step
        loader = Loader(
            np.arange(self.samples, dtype=np.int32), self.batch_size, epochs=self.epochs, seed=5,
            batch="local", part=(place, count),
        )  # fmt: skip
        if self.saves is not None:
            step.save_periodically(self.saves)
        try:
            return self._run_script(trainer, step, loader)
        except Departure:
            return End()

    def _run_script(self, trainer: int, step: Any, loader: Loader) -> End:
        state = start(self.samples)
        with step:
            if self.trainer_return_s is not None or self.changes:
                state, _ = step.resume(state)
            if self.restored is not None:
                state = step.restore(self.restored)
            for batch in step.batches(loader):
                self.took[trainer].append(batch.tolist())
                number = len(self.took[trainer])
                if (trainer, number) in self.skipped:
                    continue
                state, _ = step(state, batch)
                self.numbers[trainer].append(step.client.me.trainers)
                self.finished(trainer, number, self.pauses[trainer % len(self.pauses)])
                state = self.after_step(trainer, number, step, state)
            if self.saved is not None:
                step.save(self.saved, state)
            self.data = step.stats()["data"]
            counts, _ = step.pull(state)
            return End(None, {"counts": np.asarray(counts)}, step.stats())

    def _connect(self, trainer: int, job: Any) -> Client:
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

    def counts(self) -> np.ndarray:
        """Returns how often each sample was applied, as the last trainer to end received it."""
        return max((result["counts"] for result in self.results()), key=np.sum)
