"""Which rows go: those unseen for long, those of a low score, those that are too many."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import mix
from jaxfleet.tables.rows import Columns, Kind
from jaxfleet.tables.spec import ByScore, Capacity, Part, Unseen

P = TypeVar("P", bound=Part)

TOUCHED, TOUCHES, SHOWS, CLICKS = "touched", "touches", "shows", "clicks"
_SPARED = 16  # where a bucket has too many, one of so many goes besides: not each time anew


class Evictions:
    """What a table's spec says of rows that go.

    Args:
        parts: `Unseen`, `Capacity` and `ByScore`, each at most once.

    Raises:
        ProgramError: a part is none of them, or comes twice.
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
        """The columns that are kept for it, and the step of the last touch, which always is."""
        kinds = {TOUCHED: Kind(np.int32)}
        if self._capacity is not None and self._capacity.policy == "lfu":
            kinds[TOUCHES] = Kind(np.int32)
        if self._score is not None:
            kinds |= {SHOWS: Kind(np.float32), CLICKS: Kind(np.float32)}
        return kinds

    @property
    def scores(self) -> bool:
        """Whether rows have shows and clicks."""
        return self._score is not None

    @property
    def most(self) -> int | None:
        """How many rows there may be, None for any number."""
        return None if self._capacity is None else self._capacity.rows

    @property
    def order(self) -> tuple[str, ...]:
        """The counters by which rows go that are too many, the first one first."""
        return (TOUCHES, TOUCHED) if TOUCHES in self.counters else (TOUCHED,)

    def too_many(
        self, surplus: int, keys: np.ndarray, counters: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Returns int64[m], places of the keys of a bucket that go as it has more than its part.

        Args:
            surplus: how many more; at least 1.
            keys: int64[n], all that the bucket has.
            counters: [n] each, those of `order`.
        """
        spared = (len(keys) - surplus) // _SPARED
        return first_to_go(surplus + spared, keys, *(counters[name] for name in self.order))

    def shrink(
        self, keys: np.ndarray, slots: np.ndarray, columns: Columns, step: int
    ) -> np.ndarray:
        """Decays shows and clicks; returns bool[n], which keys go for having none or being unseen.

        Args:
            keys: int64[n], all there are.
            slots: int32[n], theirs.
            columns: of those slots.
            step: now.
        """
        goes = np.zeros(len(keys), np.bool_)
        if self._unseen is not None:
            goes |= step - columns[TOUCHED].take(slots).astype(np.int64) > self._unseen.steps
        if self._score is not None:
            goes |= _score(self._score, slots, columns) < np.float32(self._score.threshold)
        return goes


def first_to_go(count: int, keys: np.ndarray, *by: np.ndarray) -> np.ndarray:
    """Returns the places of so many keys: the least by the first of `by`, then the second, ...

    What is left equal goes by the keys' hashes: so it does not matter how rows came to be in
    their order. Nothing is sorted: of a million rows that would be felt as a pause.

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
    """Returns the error for a table that is given shows or clicks, and keeps none."""
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
