"""Zoo programs with a memory budget, compared with the plain ones."""

import re
from dataclasses import dataclass
from typing import Any

import jax

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from tests.runtime.comparing import assert_close, tolerance
from tests.shared_zoo import arrays
from tests.zoo import Case

ROWS = 256  # so that rows dominate the memory
STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """Result of a budget.

    Attributes:
        before: the peak of the plain step, in bytes.
        after: the peak of the step with the budget.
        asked: the budget used.
        refused: whether the first share is infeasible, so `asked` is the budget named by the error.
    """

    before: int
    after: int
    asked: int
    refused: bool

    def __str__(self) -> str:
        share = f"{self.after / max(1, self.before):.2f} of it"
        named = ", the least that the refusal named" if self.refused else ""
        return f"{self.before:,} -> {self.after:,} bytes, {share}; asked for {self.asked:,}{named}"


def outcome(entry: Case, share: float) -> Outcome:
    """Requests a share of a program's peak, or else the smallest feasible budget; compares.

    Raises:
        AssertionError: it takes more than the budget or the plain step, or results differ.
    """
    try:
        return _compared(entry, share, refused=False)
    except StrategyError as error:
        found = re.findall(r"made to take is ([\d,]+); as it is", "".join(error.__notes__))
    return _compared(entry, int(found[0].replace(",", "")), refused=True)


def _compared(entry: Case, budget: float, *, refused: bool) -> Outcome:
    built = entry.build(jf.distributed_optimizer)
    example = (built.state, built.batch(0, ROWS))
    strategy = jf.DistributedStrategy(mode="single", memory_budget=budget)
    step: Any = jf.distribute(built.train_step, example, strategy)
    report = step.memory_report()
    found = Outcome(report.before_bytes, report.after_bytes, report.fit.budget, refused)
    assert found.after <= found.asked, f"{entry.name}: {found}"
    assert found.after <= found.before, f"{entry.name}: {found}"
    plain, wanted, state = jax.jit(built.train_step), built.state, built.state
    for number in range(STEPS):
        batch = built.batch(number, ROWS)
        wanted, told = plain(wanted, batch)
        state, metrics = step(state, batch)
        # Other executables fuse other operators: sums and products differ in the last digits.
        where = f"of {entry.name} after step {number}"
        assert_close((state, metrics), arrays((wanted, told)), 4 * tolerance(entry), where)
    return found
