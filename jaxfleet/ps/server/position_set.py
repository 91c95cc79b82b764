"""PositionSet: an immutable set of integers, as intervals.

Its size in memory is that of its intervals, whatever their lengths.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PositionSet:
    """Integers in sorted intervals `[start, stop)` that do not touch each other.

    Examples:
        >>> some = PositionSet.of([(0, 4), (8, 10), (4, 6)])
        >>> some.spans, len(some)
        (((0, 6), (8, 10)), 8)
        >>> (some - PositionSet.of([(2, 9)])).spans
        ((0, 2), (9, 10))
    """

    spans: Spans = ()

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> Self:
        """Returns the union of intervals, which may be empty or overlap."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted(span for span in spans if span[0] < span[1]):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], stop)
            else:
                found.append((start, stop))
        return cls(tuple(found))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def __or__(self, other: "PositionSet") -> "PositionSet":
        return PositionSet.of((*self.spans, *other.spans)) if other.spans else self

    def __and__(self, other: "PositionSet") -> "PositionSet":
        return PositionSet(tuple(self._common(other)))

    def _common(self, other: "PositionSet") -> Iterator[tuple[int, int]]:
        for low, high in other.spans:
            at = max(bisect_left(self.spans, (low,)) - 1, 0)
            for start, stop in self.spans[at:]:
                if start >= high:
                    break
                if max(start, low) < min(stop, high):
                    yield max(start, low), min(stop, high)

    def __sub__(self, other: "PositionSet") -> "PositionSet":
        if not (self.spans and other.spans):
            return self
        low, high = self.spans[0][0], self.spans[-1][1]
        inner = (min(max(edge, low), high) for span in other.spans for edge in span)
        edges = iter([low, *inner, high])
        return self & PositionSet.of(zip(edges, edges, strict=True))

    def first(self, count: int) -> "PositionSet":
        """Returns the smallest `count` of them; all, if there are fewer."""
        found: list[tuple[int, int]] = []
        for start, stop in self.spans:
            if count <= 0:
                break
            found.append((start, min(stop, start + count)))
            count -= stop - start
        return PositionSet(tuple(found))
