"""Makes a program of what trainers send: its text, and the values of its constants by name."""

from collections.abc import Iterable

from jaxfleet.errors import JaxfleetError
from jaxfleet.ir import Program, parse, print_program
from jaxfleet.ir.resources import with_values
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.job_text import without_ports
from jaxfleet.ps.messages import Tensor
from jaxfleet.ps.server.desk import refusal_of
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.ps.server.plan_reader import read_plan


def read_sent(text: str, constants: Iterable[Tensor], cache: ExecutableCache) -> ServerPlan:
    """Returns the plan of a program that was sent.

    Raises:
        RefusedError: it is no server's program.
    """
    program = parse_sent(text)
    try:
        return read_plan(_with_constants(program, constants), cache)
    except Exception as error:  # whatever is wrong with the program, the server lives on
        raise refusal_of("bad_message", error) from error


def parse_sent(text: str) -> Program:
    """Returns the program that a text is.

    Raises:
        RefusedError: it is none.
    """
    try:
        return parse(text)
    except JaxfleetError as error:
        raise refusal_of("bad_message", error) from error


def is_same(text: str, plan: ServerPlan) -> bool:
    """Returns whether a program is the one of a plan, wherever the servers of both listen.

    Raises:
        RefusedError: it is not a program.
    """
    program = parse_sent(text)
    endpoints = program.attrs.get("endpoints")
    given = [str(each) for each in endpoints] if isinstance(endpoints, tuple) else []
    mine = without_ports(print_program(plan.program), plan.endpoints)
    return without_ports(print_program(program), given) == mine


def _with_constants(program: Program, tensors: Iterable[Tensor]) -> Program:
    """Returns the program with the values of its constants, which come by name."""
    scopes = (program.variables, *(block.variables for block in program.blocks))
    values = {}
    for tensor in tensors:
        for scope in scopes:
            variable = scope.get(tensor.name)
            if variable is not None and variable.constant is not None:
                values[variable.constant.digest] = tensor.array
    return with_values(program, values)
