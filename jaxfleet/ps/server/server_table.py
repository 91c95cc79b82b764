"""One table of a server: its rows, those before the last update, and administration."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.checkpoint.tables import load_tables
from jaxfleet.errors import ProgramError
from jaxfleet.ps.server.past_rows import PastRows
from jaxfleet.ps.server.scheduler import RowPush
from jaxfleet.ps.server.staleness import compensate
from jaxfleet.tables import RowBatch, TableSpec, TableStore, make_store
from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.merge_pushes import merge

_OVERHEAD = 256  # fixed cost of any work, in keys


@dataclass
class Throughput:
    """Seconds per key of an operation on rows; infinite before the first, which may compile."""

    key_s: float = math.inf

    def expected_s(self, keys: int) -> float:
        return self.key_s * (keys + _OVERHEAD)

    @contextmanager
    def measured(self, keys: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.key_s = (time.perf_counter() - start) / (keys + _OVERHEAD)


@dataclass
class _Given:
    """An export of rows in consecutive batches, while nothing changes."""

    batches: Iterator[RowBatch]
    first: int


@dataclass
class ServerTable:
    """One table.

    `shrunk` is the token of the last shrink request and the number of rows removed: a repeated
    request has no effect. `applied` counts the rows of all updates.
    """

    spec: TableSpec
    share: float
    compensation: float = 0.0
    reading: Throughput = field(default_factory=Throughput)
    writing: Throughput = field(default_factory=Throughput)
    shrunk: tuple[str, int] = ("", 0)
    applied: int = 0
    _rows: TableStore | None = None
    _past: PastRows | None = None
    _given: _Given | None = None

    @property
    def rows(self) -> TableStore:
        """Its store. Opening it compiles, so only a task accesses it."""
        if self._rows is None:
            self._rows = make_store(self.spec, share=self.share)
        return self._rows

    @rows.setter
    def rows(self, rows: TableStore) -> None:
        self._rows, self._given, self._past = rows, None, None

    @property
    def past(self) -> PastRows | None:
        """The rows before the last update, if kept."""
        return self._past

    @past.setter
    def past(self, past: PastRows) -> None:
        self._past = past

    def compile(self) -> None:
        """Compiles all operations of a step, on temporary rows."""
        scratch, key = TableStore(self.spec), np.zeros(1, np.int64)
        grads = np.zeros_like(scratch.look_up(key))
        scratch.peek(key)
        scratch.update(*merge([(key, grads), (key, grads)]))
        assert self.rows.spec == self.spec

    def stats(self) -> dict[str, float]:
        """Returns the counters; empty before there is a store."""
        return {} if self._rows is None else self._rows.stats()

    def look_up(self, keys: np.ndarray, step: int) -> np.ndarray:
        self._given = None
        with self.reading.measured(len(keys)):
            return self.rows.look_up(keys, step=step)

    def peek(self, keys: np.ndarray) -> np.ndarray:
        with self.reading.measured(len(keys)):
            return self.rows.peek(keys)

    def look_up_again(self, keys: np.ndarray, step: int) -> np.ndarray:
        """Returns rows as they were before the update of a step, which is the last one.

        Raises:
            ProgramError: they are not kept.
        """
        if self._past is None or self._past.step != step:
            what = f"the rows of table '{self.spec.name}' before step {step} are no longer kept"
            why = "a server was lost together with a trainer, or while the trainers changed"
            hint = f"{why}: start the job again from its last checkpoint (step.restore)"
            raise ProgramError(what, hint=hint)
        return self._past.before(keys, self.peek(keys))

    def update(self, pushes: Sequence[RowPush], step: int, *, keeps_past: bool = False) -> None:
        """Sums the trainers' pushes, in their order, and applies the sum once.

        With `keeps_past`, the rows before are kept until the next update.
        """
        self._given = None
        with self.writing.measured(sum(len(push.keys) for push in pushes)):
            grads = [self._corrected(push, step) for push in pushes]
            keys, sums, scores = _merged(pushes, grads)
            rate = pushes[0].learning_rate
            replaces = partial(self._keep, step) if keeps_past else None
            if len({push.adds for push in pushes}) > 1:
                raise ProgramError(f"table '{self.spec.name}' is sent gradients and changes")
            if pushes[0].adds:
                self.rows.add(keys, sums, step=step, replaces=replaces, **scores)
            else:
                self.rows.update(
                    keys, sums, step=step, learning_rate=rate, replaces=replaces, **scores
                )
        if not keeps_past:
            self._past = None
        self.applied += len(keys)

    def _keep(self, step: int, keys: np.ndarray, rows: np.ndarray) -> None:
        self._past = PastRows(step, keys, rows)

    def _corrected(self, push: RowPush, step: int) -> np.ndarray:
        """Returns the gradients of a push, compensated for changes since its sender's look-up."""
        if push.received is None:
            return push.grads
        now = self.rows.look_up(push.keys, step=step)
        return compensate(push.grads, now, push.received, self.compensation)

    def begin_anew(self) -> None:
        """Records that the job goes on from another state: what was done after it is void."""
        self._past, self.shrunk = None, ("", 0)

    def shrink(self, step: int) -> int:
        self._given = None
        return self.rows.shrink(step)

    def refill(self, folder: str, buckets: range, step: int) -> int:
        """Replaces all rows by those of a checkpoint, or of none; returns the number removed.

        Raises:
            CheckpointError: it lacks the table or is damaged; the table is unchanged.
        """
        self._given, before = None, len(self.rows)
        if not folder:
            self.rows.clear(step=step)
            return before
        store = make_store(self.spec, share=self.share)
        load_tables([open_checkpoint(Path(folder))], [store], buckets=buckets)
        self.rows = store
        return before

    def rows_from(self, first: int) -> tuple[RowBatch | None, int]:
        """Returns a batch of rows from a bucket on, and the next bucket; None at the end.

        Consecutive batches are sorted only once.
        """
        given = self._given
        if given is None or given.first != first:
            given = self._given = _Given(self.rows.live(range(first, BUCKETS)), first)
        batch = next(given.batches, None)
        if batch is None:
            self._given = None
            return None, BUCKETS
        given.first = int(bucket_of(batch.keys[-1:])[0]) + 1
        return batch, given.first


def _merged(
    pushes: Sequence[RowPush], grads: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    names = [n for n in ("shows", "clicks") if any(getattr(p, n) is not None for p in pushes)]
    if not names:
        return *merge([(p.keys, each) for p, each in zip(pushes, grads, strict=True)]), {}
    rows = [_beside(p, each, names) for p, each in zip(pushes, grads, strict=True)]
    keys, sums = merge([(p.keys, each) for p, each in zip(pushes, rows, strict=True)])
    dim = sums.shape[1] - len(names)
    return keys, sums[:, :dim], {name: sums[:, dim + at] for at, name in enumerate(names)}


def _beside(push: RowPush, grads: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns the gradients with the scores appended to each row, so that all are summed alike."""
    none = np.zeros(len(push.keys), np.float32)
    given = (getattr(push, name) for name in names)
    scores = [none if counts is None else counts for counts in given]
    return np.concatenate([grads, np.stack(scores, axis=1)], axis=1)
