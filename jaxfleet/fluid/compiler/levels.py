"""Sums of two levels, where a BuildStrategy or a transpiler asks for them and devices have them."""

from jaxfleet.fluid.compiler.strategies import BuildStrategy
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.program import Program
from jaxfleet.passes import TwoLevels
from jaxfleet.pipeline import Pass


def levels_of(
    program: Program, devices: int, *, within: int, build: BuildStrategy | None = None
) -> tuple[Pass, ...]:
    """Returns the pass that makes all-reduces of two levels; none where there is one level.

    The size that is asked for counts trainers, as in fluid, and devices where there is one trainer.

    Args:
        program: may ask for levels, by what it was transpiled with.
        devices: how many sum, of all processes.
        within: those of this process: a group, unless its size is given.
        build: may ask for levels too.
    """
    asks = build is not None and build.use_hierarchical_allreduce
    if not (asks or program._use_hierarchical_allreduce):
        return ()
    inner = build.hierarchical_allreduce_inter_nranks if build is not None else 0
    inner = inner or program._hierarchical_allreduce_inter_nranks
    size = within if inner <= 1 else inner * (within if within < devices else 1)
    if 1 < size < devices and devices % size == 0:
        return (TwoLevels(within=size, devices=devices),)
    reason = f"{devices} devices do not go in several groups of {size}"
    warn_no_effect("use_hierarchical_allreduce", reason)
    return ()
