"""One table of a server: its rows, and how long work on them takes."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ps.server.table_progress import RowPush
from jaxfleet.tables import TableSpec, TableStore
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
class Table:
    """One table.

    Attributes:
        spec: what it is.
        share: the part of its buckets that is here.
        reading: how fast look-ups are.
        writing: how fast updates are.
    """

    spec: TableSpec
    share: float
    reading: Pace = field(default_factory=Pace)
    writing: Pace = field(default_factory=Pace)
    _rows: TableStore | None = None

    @property
    def rows(self) -> TableStore:
        """Its store. Opening it compiles, so only a job asks for it."""
        if self._rows is None:
            self._rows = TableStore(self.spec, share=self.share)
        return self._rows

    @rows.setter
    def rows(self, rows: TableStore) -> None:
        self._rows = rows

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
        with self.reading.measured(len(keys)):
            return self.rows.look_up(keys, step=step)

    def update(self, pushes: Sequence[RowPush], step: int) -> None:
        """Sums what trainers pushed, in their order, and applies it once."""
        with self.writing.measured(sum(len(push.keys) for push in pushes)):
            keys, grads = merge([(push.keys, push.grads) for push in pushes])
            rate = pushes[0].learning_rate
            if len({push.adds for push in pushes}) > 1:
                raise ProgramError(f"table '{self.spec.name}' is sent gradients and changes")
            if pushes[0].adds:
                self.rows.add(keys, grads, step=step)
                return
            self.rows.update(keys, grads, step=step, learning_rate=rate)
