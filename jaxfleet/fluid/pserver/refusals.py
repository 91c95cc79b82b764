"""Says why a transpiled program cannot be run as it is written, before anything of it is sent."""

from collections.abc import Callable, Sequence

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.pserver.late_programs import with_parts, with_plain_sums
from jaxfleet.fluid.pserver.notices import NOTICES
from jaxfleet.fluid.pserver.programs import needs_of, served_blocks, without_tables
from jaxfleet.fluid.pserver.row_programs import LOOK_UP
from jaxfleet.fluid.transpiler.table_spec import REASON
from jaxfleet.ir import Kind, Operator, Program
from jaxfleet.ir.names import GRAD
from jaxfleet.passes.fl_average import SAMPLES
from jaxfleet.passes.geo_sgd import MODE as GEO

Rule = Callable[[Program], str | None]


def why_not(program: Program) -> str | None:
    """Returns why a program cannot be run exactly, and what to do; None where it can.

    Args:
        program: in the IR: a trainer's, a server's, or any other.
    """
    return next((reason for rule in _RULES if (reason := rule(program)) is not None), None)


def check_runnable(program: Program) -> None:
    """Refuses a program that cannot be run exactly.

    Raises:
        ProgramError: says why, and what to do.
    """
    reason = why_not(program)
    if reason is not None:
        what, _, hint = reason.partition("; ")
        raise ProgramError(what, hint=hint or None)


def _of_tables(program: Program) -> str | None:
    """Refuses a distributed table that servers cannot keep."""
    reason = program.attrs.get(REASON)
    return None if reason is None else str(reason)


def _of_notices(program: Program) -> str | None:
    """Refuses what has things saved among what computes: it is no part of a step."""
    types = [op.type for op in program.root.ops]
    found = [name for name in types if name in NOTICES]
    if not found or len(found) == len(types):
        return None
    return (
        f"'{found[0]}' stands among operators that compute or send; "
        "run it in a program of its own, between two steps"
    )


def _of_computed_ids(program: Program) -> str | None:
    """Refuses ids that are not fed: they go to servers before anything is computed."""
    for op in program.root.ops:
        is_geo = program.attrs.get("mode") == GEO and op.type == "send"
        if op.type in {LOOK_UP, "merge_ids"} or is_geo:
            for ids in map(str, op.inputs.slot("X" if is_geo else "Ids")):
                if ids not in program.variables or program.variables[ids].kind is not Kind.DATA:
                    return (
                        f"'{ids}' is computed, and servers are asked for its rows before that; "
                        "feed the ids of a sparse table as they are"
                    )
    return None


def _of_unmade(program: Program) -> str | None:
    """Refuses a trainer's program that sends what it does not compute."""
    made = {v.name for v in program.variables.values() if v.kind is not Kind.DATA}
    made.update(name for name in program.variables if name.startswith(SAMPLES))  # it is fed
    if program.attrs.get("mode") == GEO:
        return None
    program = with_parts(program)
    for op in program.root.ops:
        for name in op.reads:
            if op.type in {"send", "split_byref", "split_selected_rows"} and name not in made:
                return _unmade(op, name)
        made.update(op.writes)
    return None


def _of_unsent(program: Program) -> str | None:
    """Refuses a server's program that computes with what nobody sends it."""
    if not _is_served(program):
        return None
    program = without_tables(program)
    program = with_plain_sums(program)
    # Gradients are no state: what else is in no scope is found out when the scope is at hand.
    missing = {name for name in needs_of(program).state if GRAD in name}
    for index in served_blocks(program):
        for op in program.blocks[index].ops:
            for name in op.reads:
                if name in missing:
                    return _unmade(op, name)
    return None


def _unmade(op: Operator, name: str) -> str:
    return (
        f"'{op.type}' reads '{name}', which nobody makes here: it was clipped among the "
        "optimizer's operators, and those are on servers, which have slices of some gradients; "
        "clip by fluid.clip.set_gradient_clip, which stays with the trainers"
    )


def _is_served(program: Program) -> bool:
    ops: Sequence[Operator] = program.root.ops
    return len(ops) == 1 and ops[0].type in {"listen_and_serv", "fl_listen_and_serv"}


def _attr(program: Program, name: str) -> object:
    """Returns an attribute of `listen_and_serv`; None where there is none."""
    return program.root.ops[0].attrs.get(name) if _is_served(program) else None


_RULES: tuple[Rule, ...] = (
    _of_tables,
    _of_notices,
    _of_computed_ids,
    _of_unmade,
    _of_unsent,
)
