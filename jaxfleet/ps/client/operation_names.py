"""Names of the operations of all trainers, which a trainer that returns repeats."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class OperationNames:
    """Gives equal operations of a trainer at one step different names.

    A name depends only on what a trainer did at the step, so one that returns finds the same.
    """

    _counts: Counter[str] = field(default_factory=Counter)  # at step `_step`
    _step: int = -1

    def copy(self) -> "OperationNames":
        return OperationNames(self._counts.copy(), self._step)

    def next(self, step: int, what: str) -> str:
        """Returns the name of an operation at a step, which may be repeated there."""
        if self._step != step:
            self._step = step
            self._counts.clear()
        self._counts[what] += 1
        return what if self._counts[what] == 1 else f"{what}, {self._counts[what]}"
