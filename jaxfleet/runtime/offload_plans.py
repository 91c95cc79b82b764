"""Offload plans: values of a step that wait on the host to meet a memory budget."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.analysis.memory import RecomputePlan, offload_plans, stages_of
from jaxfleet.ir import Program
from jaxfleet.passes import Offload, Recompute
from jaxfleet.pipeline import Pass

_TRIES = 3  # plans, besides the one that holds least
_SHARE = 100  # reciprocal share of the step's original memory below which a value does not move


@dataclass(frozen=True)
class Way:
    """A candidate version of a step.

    Attributes:
        passes: produce it.
        note: its description.
        for_all: try it for any budget.
    """

    passes: tuple[Pass, ...]
    note: str
    for_all: bool = False


def recompute_by(plan: RecomputePlan) -> Recompute:
    """Returns the pass that applies a plan."""
    return Recompute(cuts=plan.cuts, kept=plan.kept, saved=tuple(sorted(plan.saved)))


def moving(before: int, sizes: Mapping[str, int]) -> Offload:
    """Returns the offload pass, with a threshold relative to the step's original bytes `before`."""
    smallest = min(Offload.smallest_bytes, before // _SHARE)
    return Offload(smallest_bytes=smallest, rows=max(sizes.values(), default=1))


def ways_on_host(
    program: Program,
    sizes: Mapping[str, int],
    fetched: Sequence[str],
    budget: int,
    offload: Offload,
) -> Iterator[Way]:
    """Yields the least recomputing versions within budget by the model, and the smallest one.

    Raises:
        PassError: the step has no forward and backward part to plan.
    """
    plans = offload_plans(stages_of(program, sizes, keep=fetched))
    if not plans:
        return
    least = min(plans, key=lambda made: (made.held, made.cost))
    good = [made for made in plans if made.held <= budget and made is not least]
    for made in (*good[:_TRIES], least):
        again = "some of them computed again" if made.cost else "nothing is computed again"
        note = f"{len(made.plan.kept)} groups, {again}"
        yield Way((recompute_by(made.plan), offload), note, made is least)
