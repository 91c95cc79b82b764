"""What the ranks of a fluid program have alike: values that are equal on all, and a rank's own."""

from collections.abc import Mapping

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.ir import Kind, Operator, Program

REPLICATED, OWN = "replicated", "varying"
_SHARING = ("c_allreduce", "c_allgather", "c_broadcast", "allreduce", "broadcast")
_OWN = ("c_reducescatter", "c_split", "c_alltoall")


def ranks_of(program: Program) -> int:
    """Returns the number of ranks that a collective transpiler made a program for; 1 without."""
    found = program.attrs.get("nranks", 1)
    return found if isinstance(found, int) else 1


def rank_labels(program: Program) -> tuple[dict[int, tuple[str, ...]], dict[str, str]]:
    """Returns how ranks have each output of block 0, by place, and each data and state variable.

    Data is each rank's own, and so is what is made of it until a collective makes one value of all.
    State is alike as long as each step leaves it so: the startup program broadcasts parameters.
    """
    uses = OuterUses(program)
    state = {v.name: REPLICATED for v in program.of_kind(Kind.PARAM, Kind.STATE, Kind.CONST)}
    while True:
        known = {**state, **{v.name: OWN for v in program.of_kind(Kind.DATA)}}
        given, labels = dict(known), {}
        for place, op in enumerate(program.root.ops):
            label = _label(op, known, uses)
            labels[place] = (label,) * len(op.writes)
            known.update(dict.fromkeys(op.writes, label))
            for index in op.blocks:  # a block may not run, and then leaves its own value
                known.update(dict.fromkeys(uses.of_block(index).writes, label))
        left = {name for name in state if known[name] == OWN and state[name] == REPLICATED}
        if not left:
            return labels, given
        state.update(dict.fromkeys(left, OWN))


def _label(op: Operator, known: Mapping[str, str], uses: OuterUses) -> str:
    if op.type.startswith(_SHARING):
        return REPLICATED
    if op.type.startswith(_OWN) or "random" in op.type or op.type == "dropout":
        return OWN
    read = {*op.reads, *(uses.of(op).reads if op.blocks else ())}
    return OWN if any(known.get(name) == OWN for name in read) else REPLICATED
