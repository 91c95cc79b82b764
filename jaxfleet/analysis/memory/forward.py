"""The forward part of a step in stages, and what a group of stages must run again."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One forward value, in stages.

    Attributes:
        name: the variable that holds it.
        bytes: what it counts for.
        begins: the stage that makes it.
        ends: the last stage that reads it in forward.
    """

    name: str
    bytes: int
    begins: int
    ends: int


@dataclass(frozen=True)
class Forward:
    """The values and the operators of the forward part, by number.

    Attributes:
        values: with how long forward needs them.
        maker: by value, the operator that makes it.
        is_residual: by value, whether anything but forward reads it.
        costs: by operator, of running it.
        reads: by operator, the values that it reads, of those that forward makes.
        ending: by stage, the values that are last read there.
    """

    values: tuple[Span, ...]
    maker: tuple[int, ...]
    is_residual: tuple[bool, ...]
    costs: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    ending: tuple[tuple[int, ...], ...]


class Need:
    """What a group must run again for its backward, and what it must have kept.

    A group begins at a stage, and its end moves on: what was needed for a shorter group is
    needed for a longer one.

    Attributes:
        again: operators to run again.
        saved: values that are kept, of those that may be.
        again_cost: of the operators.
        saved_bytes: of the values.
    """

    def __init__(self, forward: Forward, first: int, stored: Collection[int]) -> None:
        """Begins with an empty group.

        Args:
            forward: the forward part.
            first: the group's first stage.
            stored: values that are kept where they are needed, by number.
        """
        self.again: set[int] = set()
        self.saved: set[int] = set()
        self.again_cost = 0
        self.saved_bytes = 0
        self._forward, self._first, self._stored = forward, first, stored
        self._end = first
        self._wanted: set[int] = set()  # what crosses the end now, and is needed once it does not

    def add_stage(self) -> None:
        """Moves the end behind one more stage: what was last read there crosses it no longer."""
        ending = self._forward.ending[self._end]
        self._end += 1
        for value in ending:
            if self._forward.is_residual[value] or value in self._wanted:
                self._need(value)

    def _need(self, value: int) -> None:
        forward, waiting = self._forward, [value]
        while waiting:
            number = waiting.pop()
            span, op = forward.values[number], forward.maker[number]
            if span.begins < self._first:
                continue
            if span.ends >= self._end:
                self._wanted.add(number)
            elif number in self._stored:
                if number not in self.saved:
                    self.saved.add(number)
                    self.saved_bytes += span.bytes
            elif op not in self.again:
                self.again.add(op)
                self.again_cost += forward.costs[op]
                waiting += forward.reads[op]
