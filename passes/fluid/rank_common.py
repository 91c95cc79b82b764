"""Shared parts of passes that write a rank's program: attributes, and operators between ranks.

A rank is one of several equal processes, or devices, each with its own copy of the state. A ring is
a communicator of all ranks; fluid distributes collectives over several so that they overlap. Here
rings are metadata: XLA orders and overlaps collectives itself.
"""

from collections.abc import Iterator
from itertools import cycle

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Role, Source, Variable

BACKWARD = frozenset({Role.BACKWARD, Role.BACKWARD_LOSS})
OPTIMIZE = frozenset({Role.OPTIMIZE, Role.OPTIMIZE_LR_SCHED})
ROLE = "collective"


def check_rank(program: Program, pass_name: str, *, rank: int, nranks: int) -> None:
    """Rejects a program that was already rewritten for a rank, and a rank out of range."""
    if "role" in program.attrs:
        what = f"{pass_name}: the program is already rewritten, as a {program.attrs['role']}'s"
        raise PassError(what, hint="transpile a program once; clone it before, to do so again")
    if not 0 <= rank < nranks:
        raise PassError(f"{pass_name}: rank {rank} of {nranks}")


def check_finished_in_root(program: Program, pass_name: str) -> None:
    """Rejects a program that finishes a gradient in a sub-block, which may not run on all ranks."""
    for block in program.blocks[1:]:
        for op in block.ops:
            if op.role in BACKWARD and op.role_var:
                what = f"{pass_name}: a gradient is finished in a sub-block"
                raise PassError(what, op=op, hint="sum it in block 0")


def rank_attrs(program: Program, *, rank: int, nranks: int) -> Attrs:
    """Returns a program's attributes with the rank added."""
    return program.attrs.updated(role=ROLE, rank=rank, nranks=nranks)


def rings(count: int, pass_name: str) -> Iterator[int]:
    """Yields the ring ids round-robin, forever; raises PassError without rings."""
    if count < 1:
        raise PassError(f"{pass_name}: {count} rings", hint="nrings is at least 1")
    return cycle(range(count))


def trained_parameters(program: Program, skip: tuple[str, ...]) -> list[Variable]:
    """Returns the parameters replicated on all ranks, in order of declaration."""
    return [v for v in program.of_kind(Kind.PARAM) if v.name not in skip]


def division_op(begins: Operator, count: int) -> Operator:
    """Returns the operator that divides the loss's gradient, made by `begins`, by `count`."""
    attrs = Attrs({"scale": 1.0 / count})
    return in_place_op("scale", begins.writes[0], attrs, Role.BACKWARD, begins.source)


def wait_for_computing(name: str, role: Role, source: Source) -> Operator:
    """Returns the operator after which computed values may be communicated."""
    return in_place_op("c_sync_calc_stream", name, Attrs(), role, source)


def allreduce(name: str, ring: int, role: Role, source: Source) -> Operator:
    """Returns the operator that sums a variable over all ranks, in place."""
    attrs = Attrs({"ring_id": ring, "use_calc_stream": False})
    return in_place_op("c_allreduce_sum", name, attrs, role, source)


def wait_for_communication(
    name: str, count: int, role: Role, source: Source
) -> tuple[Operator, ...]:
    """Returns, for every ring, the operator after which communicated values may be read."""
    return tuple(
        in_place_op("c_sync_comm_stream", name, Attrs({"ring_id": ring}), role, source)
        for ring in range(count)
    )


def in_place_op(op_type: str, name: str, attrs: Attrs, role: Role, source: Source) -> Operator:
    """Returns an operator that reads and writes one variable."""
    read, written = Operands.named(X=name), Operands.named(Out=name)
    return Operator(op_type, read, written, attrs, role, source=source)
