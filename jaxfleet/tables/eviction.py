"""Eviction of rows: long unseen, of a low score, or over capacity; and records of removed keys."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import BucketCapacity, mix
from jaxfleet.tables.columns import Columns, Kind
from jaxfleet.tables.spec import ByScore, Capacity, TableSpec, Unseen
from jaxfleet.tables.validation import Part

P = TypeVar("P", bound=Part)

TOUCHED, TOUCHES, SHOWS, CLICKS = "touched", "touches", "shows", "clicks"
_SPARED = 16  # an overfull bucket drops 1/16 more than its surplus, so that this is rare


class Evictions:
    """The eviction rules of a table's spec.

    Args:
        spec: its `evictions` are `Unseen`, `Capacity` and `ByScore`, each at most once.
        is_there: returns bool[n], the keys that have a row.

    Raises:
        ProgramError: a part has another type, or is repeated; or the capacity is too small.
    """

    def __init__(self, spec: TableSpec, is_there: Callable[[np.ndarray], np.ndarray]) -> None:
        parts = spec.evictions
        self._unseen = _only(parts, Unseen)
        self._capacity = _only(parts, Capacity)
        self._score = _only(parts, ByScore)
        for part in parts:
            if not isinstance(part, Unseen | Capacity | ByScore):
                raise ProgramError(f"rows cannot go by {part!r}")
        self._members: BucketCapacity | None = None
        if self._capacity is not None:
            what = f"rows of table '{spec.name}'"
            self._members = BucketCapacity(self._capacity.rows, what, is_there)

    @property
    def counters(self) -> dict[str, Kind]:
        """The counter columns it needs, among them always the step of the last touch."""
        kinds = {TOUCHED: Kind(np.int32)}
        if self._capacity is not None and self._capacity.policy == "lfu":
            kinds[TOUCHES] = Kind(np.int32)
        if self._score is not None:
            kinds |= {SHOWS: Kind(np.float32), CLICKS: Kind(np.float32)}
        return kinds

    @property
    def scores(self) -> bool:
        return self._score is not None

    @property
    def is_bounded(self) -> bool:
        return self._members is not None

    @property
    def nbytes(self) -> int:
        return 0 if self._members is None else self._members.nbytes

    def clear(self) -> None:
        if self._members is not None:
            self._members.clear()

    def add(self, keys: np.ndarray) -> None:
        """Records that unique keys got a row, int64[n]."""
        if self._members is not None:
            self._members.add(keys)

    def remove(self, keys: np.ndarray) -> None:
        """Records that unique keys lost their row, int64[n]."""
        if self._members is not None:
            self._members.remove(keys)

    @property
    def order(self) -> tuple[str, ...]:
        """The counters that rank rows for eviction, most significant first."""
        return (TOUCHES, TOUCHED) if TOUCHES in self.counters else (TOUCHED,)

    def touch(self, columns: Columns, slots: np.ndarray, step: int) -> None:
        columns[TOUCHED].fill(slots, step)
        if TOUCHES in columns:
            touches = columns[TOUCHES]
            touches.put(slots, touches.take(slots) + np.int32(1))

    def count(
        self,
        columns: Columns,
        slots: np.ndarray,
        kept: np.ndarray | slice,
        shows: np.ndarray | None,
        clicks: np.ndarray | None,
    ) -> None:
        """Adds the kept ones of shows and clicks to the counters of rows."""
        for name, more in ((SHOWS, shows), (CLICKS, clicks)):
            if more is not None:
                column, counted = columns[name], np.asarray(more, np.float32)[kept]
                column.put(slots, column.take(slots) + counted)

    def surplus(self, counters: Callable[[np.ndarray], Mapping[str, np.ndarray]]) -> np.ndarray:
        """Returns int64[m], the keys to evict from overfull buckets.

        `counters` returns those of `order` for keys, [n] each.
        """
        found = [np.empty(0, np.int64)]
        full = [] if self._members is None else self._members.too_many()
        for bucket, surplus in full:
            assert self._members is not None
            keys = self._members.of(bucket)
            by = counters(keys)
            count = surplus + (len(keys) - surplus) // _SPARED
            goes = first_to_go(count, keys, *(by[name] for name in self.order))
            self._members.keep(bucket, np.delete(keys, goes))
            found.append(keys[goes])
        return np.concatenate(found)

    def shrink(
        self, keys: np.ndarray, slots: np.ndarray, columns: Columns, step: int
    ) -> np.ndarray:
        """Decays shows and clicks; returns bool[n], which of all keys to evict by score or age."""
        goes = np.zeros(len(keys), np.bool_)
        if self._unseen is not None:
            goes |= step - columns[TOUCHED].take(slots).astype(np.int64) > self._unseen.steps
        if self._score is not None:
            goes |= _score(self._score, slots, columns) < np.float32(self._score.threshold)
        return goes


def first_to_go(count: int, keys: np.ndarray, *by: np.ndarray) -> np.ndarray:
    """Returns the positions of the `count` least keys by the first of `by`, then the second, ...

    Ties are broken by the keys' hashes, so the result is independent of the order of rows. It
    partitions instead of sorting: sorting a million rows would be a noticeable pause.
    """
    chosen, left = [], np.arange(len(keys))
    for values in (*by, mix(keys)):
        mine = values[left]
        limit = np.partition(mine, count - 1)[count - 1]
        chosen.append(left[mine < limit])
        count -= len(chosen[-1])
        left = left[mine == limit]
    return np.concatenate([*chosen, left[:count]])


def no_scores(table: str) -> ProgramError:
    """Error for shows or clicks pushed to a table without scores."""
    what = f"table '{table}' is given shows or clicks, and keeps none"
    return ProgramError(what, hint="add jf.tables.ByScore() to its evictions")


def _score(score: ByScore, slots: np.ndarray, columns: Columns) -> np.ndarray:
    decayed = [columns[name].take(slots) * np.float32(score.decay) for name in (SHOWS, CLICKS)]
    for name, values in zip((SHOWS, CLICKS), decayed, strict=True):
        columns[name].put(slots, values)
    shows, clicks = decayed
    nonclk, click = np.float32(score.nonclk_coeff), np.float32(score.click_coeff)
    return (shows - clicks) * nonclk + clicks * click


def _only(parts: Sequence[Part], kind: type[P]) -> P | None:
    found = [part for part in parts if isinstance(part, kind)]
    if len(found) > 1:
        raise ProgramError(f"a table has '{kind.kind}' {len(found)} times among its evictions")
    return found[0] if found else None


class Tombstones:
    """Records removed keys, once there is a save to compute a delta against."""

    def __init__(self) -> None:
        self._wanted = False
        self._keys: list[np.ndarray] = []
        self._steps: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes for keys in self._keys)

    def begin(self) -> None:
        """Starts recording: from now on a delta may be requested."""
        self._wanted = True

    def add(self, keys: np.ndarray, step: int) -> None:
        """Records that keys were removed at a step."""
        if self._wanted and len(keys):
            self._keys.append(keys)
            self._steps.append(step)

    def since(self, step: int) -> np.ndarray:
        """Returns int64[m], the unique keys removed after this step, sorted."""
        found = [keys for keys, at in zip(self._keys, self._steps, strict=True) if at > step]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def forget(self, until: int) -> None:
        kept = [at > until for at in self._steps]
        self._keys = [keys for keys, keep in zip(self._keys, kept, strict=True) if keep]
        self._steps = [at for at, keep in zip(self._steps, kept, strict=True) if keep]
