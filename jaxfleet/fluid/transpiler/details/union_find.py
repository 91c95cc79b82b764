"""UnionFind: sets of things that are joined pair by pair."""

from collections.abc import Hashable, Iterable


class UnionFind:
    """Disjoint sets, with path halving (Tarjan and van Leeuwen, 1984).

    Args:
        elements: each begins as a set of its own.
    """

    def __init__(self, elements: Iterable[Hashable] | None = None) -> None:
        self._parents: dict[Hashable, Hashable] = {x: x for x in elements or ()}

    def find(self, x: Hashable) -> Hashable | None:
        """Returns what stands for an element's set; None where the element is not known."""
        if x not in self._parents:
            return None
        while self._parents[x] != x:
            self._parents[x] = self._parents[self._parents[x]]
            x = self._parents[x]
        return x

    def union(self, x: Hashable, y: Hashable) -> None:
        """Joins the sets of two elements; one that is not known begins as a set of its own."""
        for element in (x, y):
            self._parents.setdefault(element, element)
        of_x, of_y = self.find(x), self.find(y)
        assert of_x is not None
        self._parents[of_x] = of_y

    def is_connected(self, x: Hashable, y: Hashable) -> bool:
        """Tells whether two elements are in one set."""
        return x in self._parents and self.find(x) == self.find(y)
