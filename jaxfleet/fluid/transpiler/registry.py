"""Says where each variable of a job lives, for whoever saves or loads it."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from jaxfleet.analysis.slices import Slice, placement_of, slices_of
from jaxfleet.analysis.updates import Updates
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed, VarStruct
from jaxfleet.ir import Kind
from jaxfleet.ir import Program as IrProgram

_NOT_STATE = ("Param", "Grad", "LearningRate")


def registry_of(main: Program, placed: IrProgram, *, has_state: bool = True) -> VarsDistributed:
    """Returns the slices of all parameters and of the state that goes with them.

    Args:
        main: the step.
        placed: it in the IR, with slices and where they live.
        has_state: servers update; else trainers do, and servers hold parameters alone.
    """
    found, updates, placement = VarsDistributed(), Updates(placed), placement_of(placed)
    for cut in slices_of(placed):
        is_remote = has_state and cut.param in updates.prefetched
        kind = "RemotePrefetch" if is_remote else "Param"
        origin = VarStruct.of(main.global_block().var(cut.param))
        part = replace(origin, name=cut.name, shape=cut.shape)
        _add(found, origin, part, cut, kind, placement[cut.name])
        for name in _state(updates, cut.param) if has_state else ():
            like = VarStruct.of(main.global_block().var(name))
            is_cut = like.shape == origin.shape
            held = replace(like, shape=cut.shape) if is_cut else like
            _add(found, like, held, cut, "Optimizer", placement[cut.name])
        for name in _shared(placed, updates, cut.param) if has_state else ():
            found.shared.setdefault(name, placement[cut.name])
    return found


def _shared(placed: IrProgram, updates: Updates, param: str) -> Iterator[str]:
    """Yields what outlives a run of a parameter's learning rate, or of the schedule of it."""
    names = [name for op in updates.schedule for name in (*op.reads, *op.writes)]
    names += [str(n) for op in updates.of(param) for n in op.inputs.slot("LearningRate")]
    known = {v.name for v in placed.of_kind(Kind.STATE)}
    yield from (name for name in dict.fromkeys(names) if name in known)


def _state(updates: Updates, param: str) -> Iterator[str]:
    """Yields what an update keeps besides the parameter."""
    for op in updates.of(param):
        slots = dict(op.inputs.slots)
        if "Param" in slots:
            for slot, names in slots.items():
                yield from (str(name) for name in names if slot not in _NOT_STATE)


def _add(
    found: VarsDistributed, origin: VarStruct, part: VarStruct, cut: Slice, kind: str, at: str
) -> None:
    is_slice = origin.shape != part.shape
    offset = cut.start * prod(origin.shape[1:]) if is_slice else 0
    block = cut.index if is_slice else 0
    found.add_distributed_var(origin, part, is_slice, block, offset, kind, at)
