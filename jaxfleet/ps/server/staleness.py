"""How far each trainer has come, and how far one may run ahead of another: stale synchronous.

Where trainers do not wait for each other at every step, a server counts a clock for each: the last
of that trainer's own steps that is applied here. What somebody computes with is as old as the
slowest of them (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", 2013; there, reads may be served from caches, here each is asked for).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

UNBOUNDED = -1


@dataclass
class Clocks:
    """The steps of all trainers that are applied on a server.

    Attributes:
        trainers: how many there are.
        bound: a value that is given out after a trainer's step `n` has all that others sent until
            step `n - bound`; any value will do where it is `UNBOUNDED`.
        applied: the last step of each trainer, by number.
        left: trainers that nobody waits for any more.
    """

    trainers: int
    bound: int = UNBOUNDED
    applied: dict[int, int] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def restart(self, step: int) -> None:
        """Takes a step as applied, of all trainers."""
        self.applied = dict.fromkeys(range(self.trainers), step)

    def advance(self, trainer: int, step: int) -> None:
        """Notes that all that a trainer sent until a step is applied; less than before is not."""
        self.applied[trainer] = max(self.of(trainer), step)

    def of(self, trainer: int) -> int:
        """Returns the last step of a trainer that is applied, -1 before there is a state."""
        return self.applied.get(trainer, -1)

    def least(self) -> int:
        """Returns the step of the slowest of those that are waited for; of all, where none is."""
        counted = [self.of(trainer) for trainer in self._waited_for()]
        return min(counted or self.applied.values(), default=-1)

    def total(self) -> int:
        """Returns how many steps of all trainers are applied."""
        return sum(self.applied.values())

    def has(self, trainer: int, step: int) -> bool:
        """Tells whether a trainer's own steps are applied, until that one."""
        return self.of(trainer) >= step

    def allow(self, trainer: int, step: int, until: int | None = None) -> bool:
        """Tells whether a value may be given to a trainer.

        Args:
            trainer: who asks.
            step: the last that it has done.
            until: the last that it will have done when it computes with the value; `step` unless
                given.
        """
        last = step if until is None else until
        return self.has(trainer, step) and next(self.behind(last), None) is None

    def behind(self, step: int) -> Iterator[int]:
        """Yields the trainers for which one that has done a step has to wait."""
        if self.bound == UNBOUNDED:
            return
        yield from self.before(step - self.bound)

    def before(self, step: int) -> Iterator[int]:
        """Yields the trainers that have not come to a step, of those that are waited for."""
        for trainer in self._waited_for():
            if self.of(trainer) < step:
                yield trainer

    def _waited_for(self) -> Iterator[int]:
        return (trainer for trainer in range(self.trainers) if trainer not in self.left)
