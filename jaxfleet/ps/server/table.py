"""One table of a server: its rows, and how long work on them takes."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.checkpoint.tables import load_tables
from jaxfleet.errors import ProgramError
from jaxfleet.ps.server.row_copies import compensated
from jaxfleet.ps.server.table_progress import RowPush
from jaxfleet.tables import RowBatch, TableSpec, TableStore, make_store
from jaxfleet.tables.buckets import BUCKETS, bucket_of
from jaxfleet.tables.merge import merge

_OVERHEAD = 256  # keys' worth of time that any work takes


@dataclass
class Pace:
    """How fast some work on rows went the last time.

    Attributes:
        key_s: seconds for a key; infinite before the first time, which may compile.
    """

    key_s: float = math.inf

    def expected_s(self, keys: int) -> float:
        """Returns how long it takes for so many keys."""
        return self.key_s * (keys + _OVERHEAD)

    @contextmanager
    def measured(self, keys: int) -> Iterator[None]:
        """Measures what is done within."""
        start = time.perf_counter()
        yield
        self.key_s = (time.perf_counter() - start) / (keys + _OVERHEAD)


@dataclass
class _Given:
    """Rows that are given out one batch after the other, while nothing changes.

    Attributes:
        batches: those to come.
        first: the first bucket of the next.
    """

    batches: Iterator[RowBatch]
    first: int


@dataclass
class Table:
    """One table.

    Attributes:
        spec: what it is.
        share: the part of its buckets that is here.
        compensation: how much gradients are corrected by what their senders had received.
        reading: how fast look-ups are.
        writing: how fast updates are.
        shrunk: the token of the last request that rows be taken out, and how many went: it may
            come again, and does nothing then.
    """

    spec: TableSpec
    share: float
    compensation: float = 0.0
    reading: Pace = field(default_factory=Pace)
    writing: Pace = field(default_factory=Pace)
    shrunk: tuple[str, int] = ("", 0)
    _rows: TableStore | None = None
    _given: _Given | None = None

    @property
    def rows(self) -> TableStore:
        """Its store. Opening it compiles, so only a job asks for it."""
        if self._rows is None:
            self._rows = make_store(self.spec, share=self.share)
        return self._rows

    @rows.setter
    def rows(self, rows: TableStore) -> None:
        self._rows, self._given = rows, None

    def compile(self) -> None:
        """Compiles all that a step needs, on rows that are then forgotten.

        Raises:
            ProgramError: there can be no such table.
        """
        scratch, key = TableStore(self.spec), np.zeros(1, np.int64)
        grads = np.zeros_like(scratch.look_up(key))
        scratch.update(*merge([(key, grads), (key, grads)]))
        assert self.rows.spec == self.spec

    def stats(self) -> dict[str, float]:
        """Returns what was counted; nothing before there is a store."""
        return {} if self._rows is None else self._rows.stats()

    def look_up(self, keys: np.ndarray, step: int) -> np.ndarray:
        """Returns rows."""
        self._given = None
        with self.reading.measured(len(keys)):
            return self.rows.look_up(keys, step=step)

    def update(self, pushes: Sequence[RowPush], step: int) -> None:
        """Sums what trainers pushed, in their order, and applies it once."""
        self._given = None
        with self.writing.measured(sum(len(push.keys) for push in pushes)):
            grads = [self._corrected(push, step) for push in pushes]
            keys, sums, scores = _merged(pushes, grads)
            rate = pushes[0].learning_rate
            if len({push.adds for push in pushes}) > 1:
                raise ProgramError(f"table '{self.spec.name}' is sent gradients and changes")
            if pushes[0].adds:
                self.rows.add(keys, sums, step=step, **scores)
                return
            self.rows.update(keys, sums, step=step, learning_rate=rate, **scores)

    def _corrected(self, push: RowPush, step: int) -> np.ndarray:
        """Returns the gradients of a push, by how far rows moved since its sender had them."""
        if push.received is None:
            return push.grads
        now = self.rows.look_up(push.keys, step=step)
        return compensated(push.grads, now, push.received, self.compensation)

    def shrink(self, step: int) -> int:
        """Takes out the rows that its evictions say; returns how many."""
        self._given = None
        return self.rows.shrink(step)

    def refill(self, folder: str, buckets: range, step: int) -> int:
        """Takes the rows of a checkpoint, or none, in the place of all; returns how many went.

        Args:
            folder: the checkpoint's; none where it is empty.
            buckets: those that are here.
            step: now.

        Raises:
            CheckpointError: it has no such table, or is damaged; all is as it was.
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
        """Returns the rows of some buckets from one on, and the first of the next; None: no more.

        What is asked for one batch after the other is put in order once.
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
    """Returns the keys, and the sums of gradients and of scores, if any were pushed."""
    names = [n for n in ("shows", "clicks") if any(getattr(p, n) is not None for p in pushes)]
    if not names:
        return *merge([(p.keys, each) for p, each in zip(pushes, grads, strict=True)]), {}
    rows = [_beside(p, each, names) for p, each in zip(pushes, grads, strict=True)]
    keys, sums = merge([(p.keys, each) for p, each in zip(pushes, rows, strict=True)])
    dim = sums.shape[1] - len(names)
    return keys, sums[:, :dim], {name: sums[:, dim + at] for at, name in enumerate(names)}


def _beside(push: RowPush, grads: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Returns the rows of a push with its scores behind each, so that all are summed alike."""
    none = np.zeros(len(push.keys), np.float32)
    given = (getattr(push, name) for name in names)
    scores = [none if counts is None else counts for counts in given]
    return np.concatenate([grads, np.stack(scores, axis=1)], axis=1)
