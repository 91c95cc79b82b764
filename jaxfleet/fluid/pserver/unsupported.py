"""Checks that reject a transpiled program that cannot run, before anything is sent."""

from collections.abc import Callable, Sequence

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.pserver.async_normalization import with_parts, with_trainer_sums
from jaxfleet.fluid.pserver.checkpoint_notify import CHECKPOINT_OPS
from jaxfleet.fluid.pserver.normalization import served_blocks, server_inputs, without_tables
from jaxfleet.fluid.pserver.row_programs import LOOK_UP
from jaxfleet.fluid.transpiler.pserver_job import REASON
from jaxfleet.ir import Kind, Operator, Program
from jaxfleet.ir.naming import GRAD
from jaxfleet.passes.fluid.fl_average import SAMPLES
from jaxfleet.passes.fluid.geo_sgd import MODE as GEO

Rule = Callable[[Program], str | None]


def why_not(program: Program) -> str | None:
    """Returns why a program cannot be run exactly, and what to do; None if it can."""
    return next((reason for rule in _RULES if (reason := rule(program)) is not None), None)


def check_runnable(program: Program) -> None:
    """Raises ProgramError, with the reason and a hint, if a program cannot be run exactly."""
    reason = why_not(program)
    if reason is not None:
        what, _, hint = reason.partition("; ")
        raise ProgramError(what, hint=hint or None)


def _of_tables(program: Program) -> str | None:
    """Rejects a distributed table that servers cannot hold."""
    reason = program.attrs.get(REASON)
    return None if reason is None else str(reason)


def _of_notices(program: Program) -> str | None:
    """Rejects save operators among those that compute, since they are not part of a step."""
    types = [op.type for op in program.root.ops]
    found = [name for name in types if name in CHECKPOINT_OPS]
    if not found or len(found) == len(types):
        return None
    return (
        f"'{found[0]}' stands among operators that compute or send; "
        "run it in a program of its own, between two steps"
    )


def _of_computed_ids(program: Program) -> str | None:
    """Rejects computed ids, which servers need before anything is computed."""
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
    """Rejects a trainer's program that sends a variable without computing it."""
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
    """Rejects a server's program that reads a gradient that no trainer sends."""
    if not _is_served(program):
        return None
    program = without_tables(program)
    program = with_trainer_sums(program)
    # Only gradients: other missing state is detected when the scope is available.
    missing = {name for name in server_inputs(program).state if GRAD in name}
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
    return program.root.ops[0].attrs.get(name) if _is_served(program) else None


_RULES: tuple[Rule, ...] = (
    _of_tables,
    _of_notices,
    _of_computed_ids,
    _of_unmade,
    _of_unsent,
)
