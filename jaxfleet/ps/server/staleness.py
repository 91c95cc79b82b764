"""Staleness of asynchronous trainers: their clocks and bound, and delay compensation of rows.

A server keeps a clock for each trainer: its last step applied on this server. A value is as old as
the slowest clock (stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", 2013; there, reads may be served from caches, here each is
requested).

Delay compensation (DC-ASGD) corrects a late gradient of rows to `g + c * g * g * (w - w')`, where
`w'` is the row that the trainer computed with; for parameters, the server's program does it. A step
pushes the keys that it looked up, so of a table only the last look-up of each trainer is kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

UNBOUNDED = -1


@dataclass
class TrainerClocks:
    """The last applied step of each trainer on a server.

    With a `bound`, a value sent after a trainer's step `n` includes all pushes of the others up to
    step `n - bound`.
    """

    trainers: int
    bound: int = UNBOUNDED
    applied: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def restart(self, step: int) -> None:
        self.applied = dict.fromkeys(range(self.trainers), step)

    def renumber(self, former: Mapping[int, int | None]) -> None:
        """Takes other trainers: `former` has the former number of each, None if it is new.

        A new one begins where the slowest of the others is.
        """
        before = {n: self.of(old) for n, old in former.items() if old is not None}
        least = min(before.values(), default=self.least())
        self.applied = {n: before.get(n, least) for n in former}
        self.trainers, self.left = len(former), set()

    def advance(self, trainer: int, step: int) -> None:
        """Advances a trainer's clock; it never goes back."""
        self.applied[trainer] = max(self.of(trainer), step)

    def of(self, trainer: int) -> int:
        """Returns a trainer's last applied step, -1 without a state."""
        return self.applied.get(trainer, -1)

    def least(self) -> int:
        """Returns the clock of the slowest awaited trainer; of all trainers, if none is awaited."""
        counted = [self.of(trainer) for trainer in self._waited_for()]
        return min(counted or self.applied.values(), default=-1)

    def total(self) -> int:
        return sum(self.applied.values())

    def has(self, trainer: int, step: int) -> bool:
        return self.of(trainer) >= step

    def allow(self, trainer: int, step: int, until: int | None = None) -> bool:
        """Whether a value may be sent to a trainer with a completed step.

        `until` is the last step completed before it computes with the value; `step` by default.
        """
        last = step if until is None else until
        return self.has(trainer, step) and next(self.behind(last), None) is None

    def behind(self, step: int) -> Iterator[int]:
        """Yields the trainers that one with a completed step must wait for."""
        if self.bound == UNBOUNDED:
            return
        yield from self.before(step - self.bound)

    def before(self, step: int) -> Iterator[int]:
        """Yields the awaited trainers that have not reached a step."""
        for trainer in self._waited_for():
            if self.of(trainer) < step:
                yield trainer

    def _waited_for(self) -> Iterator[int]:
        return (trainer for trainer in range(self.trainers) if trainer not in self.left)


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """The rows that a trainer received and pushes gradients of: float32[m, dim].

    `places`, int64[m], are their indices among the pushed keys; it never received the others.
    """

    places: np.ndarray
    rows: np.ndarray


@dataclass
class RowSnapshots:
    """The rows that each trainer received last; none if gradients are not compensated."""

    are_kept: bool
    _given: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def give(self, table: str, trainer: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Records the rows sent to a trainer, which may not change afterwards."""
        if self.are_kept:
            self._given[table, trainer] = (keys.copy(), rows)  # a message's memory is reused

    def of(self, table: str, trainer: int, keys: np.ndarray) -> ReceivedRows | None:
        """Returns a trainer's received rows of (distinct) keys; None if there are none."""
        known = self._given.get((table, trainer))
        if known is None or not len(known[0]):
            return None
        given, rows = known
        if np.array_equal(given, keys):
            return ReceivedRows(np.arange(len(keys)), rows)
        order = np.argsort(given)
        after = np.searchsorted(given, keys, sorter=order)
        found = order[np.minimum(after, len(given) - 1)]
        places = np.flatnonzero(given[found] == keys)
        return ReceivedRows(places, rows[found[places]])

    def restart(self) -> None:
        """Discards all: the tables were replaced."""
        self._given.clear()


def compensate(
    grads: np.ndarray, now: np.ndarray, received: ReceivedRows, factor: float
) -> np.ndarray:
    """Returns gradients, float32[n, dim], corrected for changes of rows since their receipt."""
    made, at = grads.copy(), received.places
    late = made[at]
    made[at] += (now[at] - received.rows) * late * late * np.float32(factor)
    return made
