"""The best plan of a chain, by trying every set of values that each group could keep."""

from dataclasses import dataclass, field

from jaxfleet.analysis.memory import Chain

Point = tuple[int, int]  # bytes kept, and cost of recomputation


@dataclass(frozen=True)
class Oracle:
    """Finds the cost of the best plan for any budget."""

    chain: Chain
    _known: dict[tuple[int, int], list[Point]] = field(default_factory=dict)  # ways, by group

    def cost(self, budget: int) -> int | None:
        """Returns the least cost of a plan within a budget, or None."""
        fronts: list[list[Point]] = [[(0, 0)]]
        for end in range(1, self.chain.stages + 1):
            found = [
                (kept + int(self.chain.crossing[first, end]) + saved, cost + again)
                for first in range(end)
                for saved, again in self._ways(first, end)
                for kept, cost in fronts[first]
                if kept + self._held(first, end, saved, again) <= budget
            ]
            fronts.append(_best(found))
        return min((cost for _, cost in fronts[-1]), default=None)

    def _held(self, first: int, end: int, saved: int, again: int) -> int:
        at, level = (first, end), self.chain.levels[0 if again else -1]
        return int(max(self.chain.crossing[at] + saved + level.work[at], self.chain.backward[at]))

    def _ways(self, first: int, end: int) -> list[Point]:
        if end == self.chain.stages:
            return [(0, 0)]
        if (first, end) not in self._known:
            self._known[first, end] = self._all_ways(first, end)
        return self._known[first, end]

    def _all_ways(self, first: int, end: int) -> list[Point]:
        """Enumerates a group from its end: each needed value is kept or recomputed."""
        forward = self.chain.forward
        inside = [
            number
            for number, span in enumerate(forward.values)
            if first <= span.begins and span.ends < end
        ]
        start = frozenset(number for number in inside if forward.is_residual[number])
        states: dict[frozenset[int], list[Point]] = {start: [(0, 0)]}
        for number in reversed(inside):
            after: dict[frozenset[int], list[Point]] = {}
            size, maker = forward.values[number].bytes, forward.maker[number]
            parents = frozenset(forward.reads[maker]) & set(inside)
            for needed, points in states.items():
                rest = needed - {number}
                if number not in needed:
                    after.setdefault(rest, []).extend(points)
                    continue
                after.setdefault(rest, []).extend((kept + size, cost) for kept, cost in points)
                cost_of = forward.costs[maker]
                again = [(kept, cost + cost_of) for kept, cost in points]
                after.setdefault(rest | parents, []).extend(again)
            states = {needed: _best(points) for needed, points in after.items()}
        assert set(states) == {frozenset()}
        return states[frozenset()]


def _best(points: list[Point]) -> list[Point]:
    """Returns the Pareto-optimal points."""
    found: list[Point] = []
    for kept, cost in sorted(points):
        if not found or cost < found[-1][1]:
            found.append((kept, cost))
    return found
