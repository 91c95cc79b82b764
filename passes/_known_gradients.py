"""Refuses, for passes that treat each gradient, steps whose gradients are inside loops."""

from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program


def check_gradients_are_known(program: Program, pass_name: str) -> None:
    """Refuses a program that updates a parameter inside a loop or a branch of its own.

    A frozen parameter, whose new value depends on no gradient, is accepted.

    Raises:
        PassError: a parameter's gradient is not made in block 0.
    """
    trained = {param for x in program.root.ops for param, _ in x.role_var}
    for param in program.of_kind(Kind.PARAM):
        op = None if param.name in trained else _with_blocks(program, param.name)
        if op is not None:
            what = f"{pass_name}: the update of '{param.name}' runs inside a loop or a branch"
            raise PassError(what, op=op, hint="update once a step, outside of it, or leave it out")


def _with_blocks(program: Program, name: str) -> Operator | None:
    """Returns the last loop or branch that the new value of `name` is computed by, if any.

    It is the operator inside of it where that one writes `name` itself.
    Operators of block 0 that compute gradients of other parameters are not followed.
    """
    inner = (op for block in program.blocks[1:] for op in block.ops if name in op.writes)
    if (found := next(inner, None)) is not None:
        return found
    needed = {name}
    for op in reversed(program.root.ops):
        if needed.isdisjoint(op.writes) or op.role_var:
            continue
        if op.blocks:
            return op
        needed.update(op.reads)
    return None
