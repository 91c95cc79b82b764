"""What passes share that write a rank's program: facts about it, operators between ranks.

A rank is one of several equal processes, or devices, each with its own copy of the state. A ring
is a communicator of all ranks; fluid spreads collectives over several so that they overlap. Here
rings are metadata: XLA orders and overlaps collectives itself.
"""

from collections.abc import Iterator
from itertools import cycle

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Role, Source, Variable

BACKWARD = frozenset({Role.BACKWARD, Role.BACKWARD_LOSS})
OPTIMIZE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED})
ROLE = "collective"


def check(program: Program, pass_name: str, *, rank: int, nranks: int) -> None:
    """Refuses a program that was rewritten for somebody already, and a rank that is none.

    Raises:
        PassError: the error names the pass.
    """
    if "role" in program.attrs:
        what = f"{pass_name}: the program is already rewritten, as a {program.attrs['role']}'s"
        raise PassError(what, hint="transpile a program once; clone it before, to do so again")
    if not 0 <= rank < nranks:
        raise PassError(f"{pass_name}: rank {rank} of {nranks}")


def finished_in_root(program: Program, pass_name: str) -> None:
    """Refuses a program that finishes a gradient in a sub-block, which may not run on all ranks.

    Raises:
        PassError: the error shows the operator.
    """
    for block in program.blocks[1:]:
        for op in block.ops:
            if op.role in BACKWARD and op.role_var:
                what = f"{pass_name}: a gradient is finished in a sub-block"
                raise PassError(what, op=op, hint="sum it in block 0")


def facts(program: Program, *, rank: int, nranks: int) -> Attrs:
    """Returns a program's attributes with whose program it becomes."""
    return program.attrs.updated(role=ROLE, rank=rank, nranks=nranks)


def rings(count: int, pass_name: str) -> Iterator[int]:
    """Returns the rings in turn, for ever.

    Raises:
        PassError: there is none.
    """
    if count < 1:
        raise PassError(f"{pass_name}: {count} rings", hint="nrings is at least 1")
    return cycle(range(count))


def trained(program: Program, skip: tuple[str, ...]) -> list[Variable]:
    """Returns the parameters that all ranks have alike, in order of declaration."""
    return [v for v in program.of_kind(Kind.PARAM) if v.name not in skip]


def divided(begins: Operator, count: int) -> Operator:
    """Returns the operator that divides the gradient with which all others begin.

    Args:
        begins: what makes that gradient, of the loss.
        count: by how many.
    """
    attrs = Attrs({"scale": 1.0 / count})
    return in_place("scale", begins.writes[0], attrs, Role.BACKWARD, begins.source)


def wait_for_computing(name: str, role: Role, source: Source) -> Operator:
    """Returns the operator after which what was computed may be communicated."""
    return in_place("c_sync_calc_stream", name, Attrs(), role, source)


def allreduce(name: str, ring: int, role: Role, source: Source) -> Operator:
    """Returns the operator that sums a variable over all ranks, in place."""
    attrs = Attrs({"ring_id": ring, "use_calc_stream": False})
    return in_place("c_allreduce_sum", name, attrs, role, source)


def wait_for_communication(
    name: str, count: int, role: Role, source: Source
) -> tuple[Operator, ...]:
    """Returns, for every ring, the operator after which what it carried may be read."""
    return tuple(
        in_place("c_sync_comm_stream", name, Attrs({"ring_id": ring}), role, source)
        for ring in range(count)
    )


def in_place(op_type: str, name: str, attrs: Attrs, role: Role, source: Source) -> Operator:
    """Returns an operator that reads and writes one variable."""
    read, written = Operands.named(X=name), Operands.named(Out=name)
    return Operator(op_type, read, written, attrs, role, source=source)
