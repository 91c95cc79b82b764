"""Refuses, for passes that treat each gradient, steps whose gradients are inside loops."""

from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Program


def check_gradients_are_known(program: Program, pass_name: str) -> None:
    """Refuses a program that updates a parameter inside a loop or a branch of its own.

    Raises:
        PassError: a parameter's gradient is not made in block 0.
    """
    trained = {param for x in program.root.ops for param, _ in x.role_var}
    for param in program.of_kind(Kind.PARAM):
        if param.name not in trained:
            what = f"{pass_name}: the update of '{param.name}' runs inside a loop or a branch"
            op = next((x for x in program.root.ops if param.name in x.writes), None)
            raise PassError(what, op=op, hint="update once a step, outside of it, or leave it out")
