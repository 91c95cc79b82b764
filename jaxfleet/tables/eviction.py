"""Eviction of rows: long unseen, of a low score, or over capacity."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import mix
from jaxfleet.tables.columns import Columns, Kind
from jaxfleet.tables.spec import ByScore, Capacity, Part, Unseen

P = TypeVar("P", bound=Part)

TOUCHED, TOUCHES, SHOWS, CLICKS = "touched", "touches", "shows", "clicks"
_SPARED = 16  # an overfull bucket drops 1/16 more than its surplus, so that this is rare


class Evictions:
    """The eviction rules of a table's spec.

    Args:
        parts: `Unseen`, `Capacity` and `ByScore`, each at most once.

    Raises:
        ProgramError: a part has another type, or is repeated.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._unseen = _only(parts, Unseen)
        self._capacity = _only(parts, Capacity)
        self._score = _only(parts, ByScore)
        for part in parts:
            if not isinstance(part, Unseen | Capacity | ByScore):
                raise ProgramError(f"rows cannot go by {part!r}")

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
    def most(self) -> int | None:
        return None if self._capacity is None else self._capacity.rows

    @property
    def order(self) -> tuple[str, ...]:
        """The counters that rank rows for eviction, most significant first."""
        return (TOUCHES, TOUCHED) if TOUCHES in self.counters else (TOUCHED,)

    def too_many(
        self, surplus: int, keys: np.ndarray, counters: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Returns int64[m], the positions of the keys to evict from an overfull bucket.

        Args:
            surplus: number of keys over the bucket's share; at least 1.
            keys: int64[n], all keys of the bucket.
            counters: [n] each, those of `order`.
        """
        spared = (len(keys) - surplus) // _SPARED
        return first_to_go(surplus + spared, keys, *(counters[name] for name in self.order))

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

    Args:
        count: from 1 to n.
        keys: int64[n].
        *by: [n] each.
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
