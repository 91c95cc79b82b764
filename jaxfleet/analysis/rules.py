"""Rules of the verifier that need to know what operators mean."""

from collections.abc import Iterator

from jaxfleet.analysis.flow import Flow, Value
from jaxfleet.analysis.labels import own_state
from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Finding, Kind, Program, Rule

# What makes a value that devices have in common of values that are each device's own.
_SHARED_BY = ("c_allreduce_", "c_allgather")
# What makes a value of a device's own of nothing, or of a value that all have in common.
_OWN_BY = frozenset(
    {
        *("c_split", "c_reducescatter", "c_alltoall", "c_summand", "c_local"),
        *("c_iota", "c_random_bits", "c_random_split"),
    }
)


def state_is_the_same_on_every_device(program: Program) -> Iterator[Finding]:
    """In a program for several devices, what a device alone knows reaches state by a collective."""
    if program.attrs.get("devices", 1) == 1:
        return
    cut, persistable = {*_cut(program), *own_state(program)}, (Kind.PARAM, Kind.STATE)
    data = [v.name for v in program.of_kind(Kind.DATA, *persistable) if v.name in cut]
    flow = Flow.of(program, inputs=data)
    own = {value for value in flow.readers if _is_own(flow, value)}
    for block in program.blocks:
        for place, op in enumerate(block.ops):
            if op.type in _OWN_BY:
                own.update(Value(block.index, place, n) for n in range(len(op.writes)))
    reached = own | flow.reached(own, lambda value: not _is_shared(flow, value))
    for variable in program.of_kind(*persistable):
        if variable.name in cut:
            continue
        value = flow.final.get(variable.name)
        if value in reached:
            what = f"'{variable.name}' ends with another value on each device"
            yield what, flow.op(value)


def what_was_released_is_not_read(program: Program) -> Iterator[Finding]:
    """Nothing reads what a `delete_var` let go, unless something wrote it again."""
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
    state_is_the_same_on_every_device,
    what_was_released_is_not_read,
)


def _cut(program: Program) -> set[str]:
    pairs = program.attrs.get("sharded", ())
    assert isinstance(pairs, tuple)
    return {str(pair[0]) for pair in pairs if isinstance(pair, tuple)}


def _is_own(flow: Flow, value: Value) -> bool:
    """Tells whether a value is an input of the program: those that `Flow` was given are cut."""
    return flow.op(value) is None and value.block == 0


def _is_shared(flow: Flow, value: Value) -> bool:
    op = flow.op(value)
    return op is not None and op.type.startswith(_SHARED_BY)
