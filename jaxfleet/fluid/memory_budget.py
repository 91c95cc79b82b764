"""A budget of memory for a program that an Executor runs on one device: an addition to fluid."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import StrategyError
from jaxfleet.runtime.memory_report import MemoryReport
from jaxfleet.runtime.prepared import Prepared
from jaxfleet.runtime.within_budget import WithinBudget, within_budget


@dataclass(eq=False)
class MemoryBudget:
    """What a CompiledProgram may take besides its state, what is fed and what is fetched.

    Attributes:
        amount: in bytes where it is an int, of the peak as it is where it is a float.
        made: what was made to fit, for each choice of what is fed and fetched.
    """

    amount: float
    made: list[WithinBudget] = field(default_factory=list)

    def fitted(self, prepared: Prepared, fetch: tuple[str, ...], device: Any) -> Prepared:
        """Returns a prepared program that plans for the shapes it is fed when it first is."""
        found = within_budget(prepared, fetch, self.amount, device)
        assert isinstance(found.function, WithinBudget)
        self.made.append(found.function)
        return found

    def report(self) -> MemoryReport:
        """Returns what the program takes, as it was last compiled.

        Raises:
            StrategyError: it has not run.
        """
        ran = [fitted for one in self.made for fitted in one.fitted.values()]
        if not ran:
            what = "memory_report: the program has not run, and is planned for what it is fed"
            raise StrategyError(what, hint="run it once by an Executor")
        return ran[-1].report()


def refused_budget(whose: str) -> StrategyError:
    """Returns the error about a budget for what is not planned.

    Args:
        whose: what was to be run within it.
    """
    what = f"build_strategy.memory_budget: {whose} is not made to fit a budget"
    hint = "leave it out, or run a program on one device; jf.distribute plans for all modes"
    return StrategyError(what, hint=hint)


def is_budget(value: Any) -> bool:
    """Tells whether something is a budget: None, bytes, or a fraction up to 1.0."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return bool(0 < value <= 1 if isinstance(value, float | np.floating) else value > 0)
