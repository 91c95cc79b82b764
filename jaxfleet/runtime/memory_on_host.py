"""Ways to let values of a step wait on the host, so that it meets a budget of memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.analysis.memory import Plan, offloaded_plans, stages_of
from jaxfleet.ir import Program
from jaxfleet.passes import Offload, Recompute
from jaxfleet.pipeline import Pass

_TRIES = 3  # plans, besides the one that holds least
_SHARE = 100  # of what a step takes as it is: what is smaller than this part of it does not move


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        passes: what makes the step so.
        note: what it does, in words.
        for_all: it is tried whatever the budget is.
    """

    passes: tuple[Pass, ...]
    note: str
    for_all: bool = False


def recompute_by(plan: Plan) -> Recompute:
    """Returns the pass that writes a plan down."""
    return Recompute(cuts=plan.cuts, kept=plan.kept, saved=tuple(sorted(plan.saved)))


def moving(before: int, sizes: Mapping[str, int]) -> Offload:
    """Returns the pass that moves values; of a small step, small ones too.

    Args:
        before: what the step takes as it is, in bytes.
        sizes: a number for every letter.
    """
    smallest = min(Offload.smallest_bytes, before // _SHARE)
    return Offload(smallest_bytes=smallest, rows=max(sizes.values(), default=1))


def ways_on_host(
    program: Program,
    sizes: Mapping[str, int],
    fetched: Sequence[str],
    budget: int,
    offload: Offload,
) -> Iterator[Way]:
    """Yields ways: what runs least again and meets the budget by the model, and what holds least.

    Args:
        program: the step as it is.
        sizes: a number for every letter.
        fetched: what is read when the step is over.
        budget: in bytes.
        offload: the pass that moves values.

    Raises:
        PassError: the step has no forward and backward part to plan.
    """
    plans = offloaded_plans(stages_of(program, sizes, keep=fetched))
    if not plans:
        return
    least = min(plans, key=lambda made: (made.held, made.cost))
    good = [made for made in plans if made.held <= budget and made is not least]
    for made in (*good[:_TRIES], least):
        again = "some of them computed again" if made.cost else "nothing is computed again"
        note = f"{len(made.plan.kept)} groups, {again}"
        yield Way((recompute_by(made.plan), offload), note, made is least)
