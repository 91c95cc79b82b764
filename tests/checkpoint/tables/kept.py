"""Store of rows in a dict, with every feature that a save must preserve."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.tables import Adam, RowBatch, TableSpec
from jaxfleet.tables.buckets import BUCKETS, bucket_of, buckets_of

DIM = 16


@dataclass
class Row:
    """A row with its metadata."""

    row: np.ndarray
    moment: np.ndarray
    steps: int
    touched: int
    shows: float


@dataclass
class Kept:
    """A simple `RowKeeper`, correct by inspection."""

    name: str = "users"
    buckets: range = range(BUCKETS)
    rows: dict[int, Row] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)

    @property
    def spec(self) -> TableSpec:
        return TableSpec(name=self.name, dim=DIM, optimizer=Adam())

    def touch(self, keys: np.ndarray, step: int) -> None:
        """Gives rows numbers that depend only on the key and the step."""
        for key in self._mine(keys):
            before = self.rows.get(key)
            numbers = np.arange(DIM, dtype=np.float32) + np.float32(key % 1000 + step / 7)
            steps = before.steps + 1 if before else 1
            self.rows[key] = Row(numbers, -numbers, steps, step, step / 3)
            self.waiting.pop(key, None)
            self.left.pop(key, None)

    def wait(self, keys: np.ndarray, step: int) -> None:
        for key in self._mine(keys):
            if key not in self.rows:
                self.waiting[key] = (self.waiting.get(key, (0, 0))[0] + 1, step)
                self.left.pop(key, None)

    def remove(self, keys: np.ndarray, step: int) -> None:
        for key in self._mine(keys):
            if self.rows.pop(key, None) or self.waiting.pop(key, None):
                self.left[key] = step

    def _mine(self, keys: np.ndarray) -> list[int]:
        places = bucket_of(keys)
        return keys[(places >= self.buckets.start) & (places < self.buckets.stop)].tolist()

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        since = -1 if touched_since is None else touched_since
        keys = _ordered(key for key, row in self.rows.items() if row.touched > since)
        waiting = _ordered(key for key, (_, at) in self.waiting.items() if at > since)
        left = [] if touched_since is None else [k for k, at in self.left.items() if at > since]
        for first in range(0, BUCKETS, 50):
            several = [_within(one, first) for one in (keys, waiting, _ordered(left))]
            if any(map(len, several)):
                yield self._batch(*several)

    def _batch(self, keys: np.ndarray, waiting: np.ndarray, left: np.ndarray) -> RowBatch:
        rows = [self.rows[key] for key in keys.tolist()]
        counts = [self.waiting[key] for key in waiting.tolist()]
        return RowBatch(
            keys=keys,
            rows=np.array([r.row for r in rows], np.float32).reshape(-1, DIM),
            state={
                "moment": np.array([r.moment for r in rows], np.float32).reshape(-1, DIM),
                "steps": np.array([r.steps for r in rows], np.int32),
            },
            counters={
                "touched": np.array([r.touched for r in rows], np.int64),
                "shows": np.array([r.shows for r in rows], np.float32),
            },
            candidates=waiting,
            counts=np.array([count for count, _ in counts], np.int32),
            counted=np.array([at for _, at in counts], np.int64),
            gone=left,
        )

    def put(self, batch: RowBatch) -> None:
        assert not len(batch.gone)
        state, counters = batch.state, batch.counters
        for i, key in enumerate(batch.keys.tolist()):
            assert key not in self.rows
            self.rows[key] = Row(
                batch.rows[i],
                state["moment"][i],
                int(state["steps"][i]),
                int(counters["touched"][i]),
                float(counters["shows"][i]),
            )
        for i, key in enumerate(batch.candidates.tolist()):
            assert key not in self.waiting
            self.waiting[key] = (int(batch.counts[i]), int(batch.counted[i]))

    def forget_gone(self, until: int) -> None:
        self.left = {key: at for key, at in self.left.items() if at > until}

    def content(self) -> bytes:
        """Returns the content as bytes in canonical order."""
        parts: list[bytes] = []
        for batch in self.batches():
            arrays = [batch.keys, batch.rows, *batch.state.values(), *batch.counters.values()]
            arrays += [batch.candidates, batch.counts, batch.counted]
            parts += [array.tobytes() for array in arrays]
        return b"|".join(parts)


def _ordered(keys: "Iterator[int] | list[int]") -> np.ndarray:
    found = np.array(list(keys), np.int64)
    return found[np.lexsort((found, bucket_of(found)))]


def _within(keys: np.ndarray, first: int) -> np.ndarray:
    places = bucket_of(keys)
    return keys[(places >= first) & (places < first + 50)]


def servers(count: int, name: str = "users") -> list[Kept]:
    return [Kept(name, buckets_of(server, count)) for server in range(count)]


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    """Returns distinct keys from all of int64, including both ends."""
    info = np.iinfo(np.int64)
    drawn = np.random.default_rng(seed).integers(info.min, info.max, count, np.int64)
    return np.unique(np.concatenate([drawn[: count - 3], [info.min, info.max, 0]]))
