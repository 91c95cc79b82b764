"""Counts how old the values are that steps compute with."""

from collections import Counter
from dataclasses import dataclass, field

from jaxfleet.ps.messages import Plain


@dataclass
class Lags:
    """How many steps of how many lacked how many steps of the slowest trainer.

    Attributes:
        bound: the most that may be.
        counts: steps by their lag.
    """

    bound: int
    counts: Counter[int] = field(default_factory=Counter)

    def note(self, lag: int) -> None:
        """Counts a step."""
        self.counts[max(lag, 0)] += 1

    def plain(self) -> dict[str, Plain]:
        """Returns the numbers: `bound`, `max`, `mean` and `histogram`, steps by lag."""
        steps = self.counts.total()
        mean = sum(lag * count for lag, count in self.counts.items()) / steps if steps else 0.0
        histogram: dict[str, Plain] = {str(lag): self.counts[lag] for lag in sorted(self.counts)}
        most = max(self.counts, default=0)
        return {"bound": self.bound, "max": most, "mean": mean, "histogram": histogram}
