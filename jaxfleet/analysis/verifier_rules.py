"""Rules of the verifier that depend on the meaning of operators."""

from collections.abc import Iterator

from jaxfleet.analysis.effects import OuterUses
from jaxfleet.analysis.flow import Flow, FlowValue
from jaxfleet.analysis.sharding import own_state
from jaxfleet.ir import Finding, Kind, Program, Rule

# These make a replicated value of values that are each device's own.
_SHARED_BY = ("c_allreduce_", "c_allgather")
# These make a device's own value of none, or of a replicated value.
_OWN_BY = frozenset(
    {
        *("c_split", "c_reducescatter", "c_alltoall", "c_summand", "c_local"),
        *("c_iota", "c_random_bits", "c_random_split"),
    }
)


def state_is_replicated(program: Program) -> Iterator[Finding]:
    """In a program for several devices, a device's own value reaches state through a collective."""
    if program.attrs.get("devices", 1) == 1:
        return
    cut, persistable = {*_cut(program), *own_state(program)}, (Kind.PARAM, Kind.STATE)
    data = [v.name for v in program.of_kind(Kind.DATA, *persistable) if v.name in cut]
    flow = Flow.of(program, inputs=data)
    own = {value for value in flow.readers if _is_own(flow, value)}
    for block in program.blocks:
        for place, op in enumerate(block.ops):
            if op.type in _OWN_BY:
                own.update(FlowValue(block.index, place, n) for n in range(len(op.writes)))
    reached = own | flow.reached(own, lambda value: not _is_shared(flow, value))
    for variable in program.of_kind(*persistable):
        if variable.name in cut:
            continue
        value = flow.final.get(variable.name)
        if value in reached:
            what = f"'{variable.name}' ends with another value on each device"
            yield what, flow.op(value)


def released_variables_are_not_read(program: Program) -> Iterator[Finding]:
    """No operator reads a variable that a `delete_var` released, unless it was written again."""
    if not any(op.type == "delete_var" for op in program.root.ops):
        return
    uses, released = OuterUses(program), set[str]()
    for op in program.root.ops:
        used = uses.of(op)
        for name in sorted(released & used.reads):
            what = f"'{name}' is read after delete_var let it go"
            yield (f"'{name}' is let go twice" if op.type == "delete_var" else what), op
        released -= used.writes
        if op.type == "delete_var":
            released.update(op.reads)


meaning_rules: tuple[Rule, ...] = (
    state_is_replicated,
    released_variables_are_not_read,
)


def _cut(program: Program) -> set[str]:
    pairs = program.attrs.get("sharded", ())
    assert isinstance(pairs, tuple)
    return {str(pair[0]) for pair in pairs if isinstance(pair, tuple)}


def _is_own(flow: Flow, value: FlowValue) -> bool:
    """Whether a value is a sharded input of the program, given to `Flow` as one."""
    return flow.op(value) is None and value.block == 0


def _is_shared(flow: Flow, value: FlowValue) -> bool:
    op = flow.op(value)
    return op is not None and op.type.startswith(_SHARED_BY)
