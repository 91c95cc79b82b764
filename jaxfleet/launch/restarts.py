"""How often, and after what delay, a dead process is started again."""

from dataclasses import dataclass

from jaxfleet.launch.process import Process

_AGAIN_S = 0.5
_LONGEST_S = 30.0
_QUICK_S = 60.0  # an error sooner is likely to be the next start's, too
_MOST_QUICK = 3  # such errors in a row


@dataclass
class RestartBudget:
    """Restarts of one process.

    A process that ends with an error of its own soon after its start, time and again, is not worth
    more starts. One that a signal ends, such as the kernel's when memory is short, may be.

    Attributes:
        most: the number allowed.
        gives_up: whether errors of its own in a row use the budget up.
        count: the number of restarts so far.
    """

    most: int
    gives_up: bool = False
    count: int = 0
    _quick: int = 0

    def spend(self, process: Process) -> float | None:
        """Counts a restart; returns the delay in seconds before it, None if there is none left."""
        status = process.status
        has_erred = status is not None and 0 < status < 128 and process.seconds < _QUICK_S
        self._quick = self._quick + 1 if has_erred else 0
        if self.count >= self.most or (self.gives_up and self._quick > _MOST_QUICK):
            return None
        self.count += 1
        doubled: float = _AGAIN_S * 2 ** max(self._quick - 1, 0)
        return min(doubled, _LONGEST_S) if self.gives_up else _AGAIN_S

    @property
    def why_none(self) -> str:
        """Why there is no further restart; empty if the number allowed explains it."""
        if self.count >= self.most:
            return ""
        return f"it failed {self._quick} times in a row soon after its start"
