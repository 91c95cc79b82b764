"""Sequences of unequal lengths on a device: their rows one after the other, and their lengths.

What is declared with `lod_level=1` is fed as a LoDTensor, or as a list of sequences. On the device
it is two arrays: the rows of all sequences, `[rows, ...]`, as fluid's operators see them, and the
lengths, `i32[b]`, under the variable's name with `@LENGTHS`.

How many rows there are is a size with a letter of the variable's own. Shape inference carries
letters, so whatever has as many rows as a variable has its sequences too, and no operator needs a
rule for that: an embedding of words, an `fc` of that, and the gradients of both. The operators
that need to know where sequences end (`sequence_pool`) have a slot of ours beside fluid's,
`XLengths`. A program under construction leaves it empty; `with_lengths` fills it where a program
is made ready to run.

Two that an operator reads side by side, row by row, have as many rows, and share the letter of one
(`join_rows`); they are fed with equal lengths.

Each number of rows would be a program of its own to XLA. So rows are added, copies of the last,
up to the next of a few numbers, wherever that changes no result (`ragged_values`): where all that
reads the rows works row by row or knows the lengths. A `mean` over the words of a batch does
not, and such a program is compiled for each number of rows. What is fetched has its own rows only.

Sequences that an operator makes of others (`sequence_slice`) have lengths that the program
computes; see `jaxfleet.fluid.made_sequences`. An operator that puts each sequence on a row of an
array needs to know how long the longest is: it has a slot `XPlaces` for as many numbers, or `XRoom`
where a few more do not matter, as arrays are of few sizes then.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from jaxfleet.fluid.infer import UNKNOWN
from jaxfleet.fluid.made_sequences import OUT_LENGTHS, made_sequences, makes_lengths
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Block, Kind, Operands, Size
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ir import Variable as IrVariable
from jaxfleet.ir.dims import letter, substitute
from jaxfleet.ops.fluid import schema_of

if TYPE_CHECKING:
    from jaxfleet.fluid.program import Program

T = TypeVar("T")

_LENGTHS, _PLACES, _ROOM = "@LENGTHS", "@PLACES", "@ROOM"
# What ends the name of a slot for the lengths of what is in another (XLengths), or for places.
_SLOT, _PLACES_SLOT, _ROOM_SLOT = "Lengths", "Places", "Room"
_SHORTEN = frozenset({"sequence_slice", "sequence_erase"})  # make no sequence longer


def lengths_of(name: str) -> str:
    """Returns the name of what holds the lengths of a variable's sequences."""
    return name + _LENGTHS


def source_name(name: str) -> str:
    """Returns the name of what a variable holds the lengths of."""
    return name.removesuffix(_LENGTHS)


def places_of(name: str) -> str:
    """Returns the name of what has as many places as the longest of a variable's sequences."""
    return name + _PLACES


def room_of(name: str) -> str:
    """Returns the name of what has at least as many places as the longest."""
    return name + _ROOM


def longest_of(source: Variable) -> Size:
    """Returns the size that is the length of the longest sequence that is fed to a variable."""
    return _own_letter(source, "longest")


def room_for(variable: Variable) -> Size:
    """Returns how many places there are for the longest of a variable's sequences."""
    assert variable.sizes
    fed = fed_source(variable)
    return variable.sizes[0] if fed is None else _own_letter(fed, "room")


def _own_letter(source: Variable, what: str) -> Size:
    assert source.sizes
    return letter(f"{str(source.sizes[0]).removesuffix('_rows')}_{what}")


def source_of(variable: Variable, ragged: Mapping[str, T]) -> T | None:
    """Returns what was fed as sequences that a variable has too; None where it has none.

    Args:
        variable: of the program.
        ragged: what is fed as sequences, or its name, by the letter that is its number of rows.
    """
    return ragged.get(str(variable.sizes[0])) if variable.sizes else None


def ragged_data(program: "Program") -> dict[str, Variable]:
    """Returns what says the lengths of sequences, by their number of rows.

    What the program is fed, by its letter, and what operators make of it.
    """
    found = {rows: data[0] for rows, data in data_by_rows(program).items()}
    for _, made in made_sequences(program):
        if made.sizes:
            found.setdefault(str(made.sizes[0]), made)
    return found


def fed_source(variable: Variable) -> Variable | None:
    """Returns what is fed whose longest sequence is as long as any of a variable's, or longer."""
    program, source = variable.block.program, variable
    makers = {name: op for op, made in made_sequences(program) for name in [made.name]}
    while (found := source_of(source, ragged_data(program))) is not None and not found.is_data:
        maker = makers[found.name]
        if maker.type not in _SHORTEN:
            return None
        source = maker.block._var_recursive(maker.input("X")[0])
    return found


def data_by_rows(program: "Program") -> dict[str, list[Variable]]:
    """Returns what a program is fed as sequences of equal lengths, by their number of rows."""
    found: dict[str, list[Variable]] = {}
    for variable in program.global_block().vars.values():
        if variable.is_data and variable.lod_level and variable.sizes:
            found.setdefault(str(variable.sizes[0]), []).append(variable)
    return found


def join_rows(program: "Program", variables: Iterable[Variable]) -> bool:
    """Declares that the sequences of some variables have equal lengths; False if there is but one.

    An operator that works row by row on two of them (a sum of embeddings of words and of their
    contexts) implies it. Fluid finds out when it runs; here it is checked when they are fed. Rows
    in groups (`reshape` of words to `[-1, 5]`) are as many as the rows that they meet, too.
    """
    met = list(variables)
    sources = [source_of(v, ragged_data(program)) for v in met]
    fed = {str(v.sizes[0]): v for v in sources if v is not None and v.sizes}
    groups = list(dict.fromkeys(str(v.sizes[0]) for v in met if v.sizes and _is_grouped(v)))
    if len(fed) + len(groups) < 2 or not all(v.is_data for v in fed.values()):
        return False
    joined = list(fed.values())
    same = {
        str(_own_letter(other, what)): _own_letter(joined[0], what)
        for other in joined[1:]
        for what in ("rows", "longest")
    }
    rows = _own_letter(joined[0], "rows") if joined else letter(groups[0])
    same |= dict.fromkeys(groups, rows)
    for block in program.blocks:
        for variable in block.vars.values():
            if variable.sizes is not None:
                variable.sizes = tuple(substitute(size, same) for size in variable.sizes)
    program.version += 1
    return True


def _is_grouped(variable: Variable) -> bool:
    rows = str(variable.sizes[0]) if variable.sizes else ""
    return rows.isidentifier() and rows.endswith(UNKNOWN)


def with_lengths(made: IrProgram, program: "Program") -> IrProgram:
    """Gives operators the lengths of the sequences that they work on, and has others say them.

    Args:
        made: the program in the IR.
        program: what it was made of.
    """
    ragged = ragged_data(program)
    if not ragged:
        return made
    aside = {rows: _Aside.of(source) for rows, source in ragged.items()}
    blocks = tuple(_with_lengths(made, block, aside) for block in made.blocks)
    used = {name for block in blocks for op in block.ops for name in op.reads}
    sources = [v for v in ragged.values() if v.is_data]
    places = [(place(v.name), size) for v in sources for place, size in (
        (lengths_of, letter("b")), (places_of, longest_of(v)), (room_of, _own_letter(v, "room")))
    ]  # fmt: skip
    added = {n: IrVariable(n, "i32", (size,), Kind.DATA) for n, size in sorted(places) if n in used}
    return replace(made, variables={**made.variables, **added}, blocks=blocks)


@dataclass(frozen=True)
class _Aside:
    """What there is beside sequences: names by the end of the slot that takes them."""

    names: Mapping[str, str | None]

    @classmethod
    def of(cls, source: Variable) -> "_Aside":
        fed = source if source.is_data else fed_source(source)
        places, room = (places_of(source.name), room_of(fed.name)) if fed else (None, None)
        exact = places if source.is_data else None
        return cls({_SLOT: lengths_of(source.name), _PLACES_SLOT: exact, _ROOM_SLOT: room})


def _with_lengths(made: IrProgram, block: Block, aside: Mapping[str, _Aside]) -> Block:
    def filled(op: IrOperator) -> IrOperator:
        slots = [name for name in slots_aside(op) if not op.inputs.slot(name)]
        given = {slot: _names(op, slot) for slot in slots}
        more = [(slot, names) for slot, names in given.items() if names]
        op = replace(op, inputs=Operands((*op.inputs.slots, *more))) if more else op
        if not makes_lengths(op.type):
            return op
        own = (OUT_LENGTHS, (lengths_of(str(op.outputs.slot("Out")[0])),))
        return replace(op, outputs=Operands((*op.outputs.slots, own)))

    def _names(op: IrOperator, slot: str) -> tuple[str, ...]:
        end = next(end for end in (_SLOT, _PLACES_SLOT, _ROOM_SLOT) if slot.endswith(end))
        found = [_beside(name, end) for name in op.inputs.slot(slot.removesuffix(end))]
        return tuple(name for name in found if name is not None)

    def _beside(operand: object, end: str) -> str | None:
        found = _declared(made, block, str(operand))
        known = aside.get(str(found.shape[0])) if found and found.shape else None
        return known.names[end] if known else None

    ops = [filled(op) for op in block.ops]
    own = [str(name) for op in ops for name in op.outputs.slot(OUT_LENGTHS)]
    return block.with_ops(ops, declare=[IrVariable(name, "i32", (letter("b"),)) for name in own])


def _declared(program: IrProgram, block: Block, name: str) -> IrVariable | None:
    scopes = (block.variables, program.root.variables, program.variables)
    return next((scope[name] for scope in scopes if name in scope), None)


def slots_for_lengths(op_type: str) -> list[str]:
    """Returns the slots of an operator type that take lengths."""
    return _slots(op_type, _SLOT)


def slots_aside(op: IrOperator) -> list[str]:
    """Returns the slots of an operator that take what there is beside sequences.

    A `sequence_pad` that says how long its rows are needs no places.
    """
    ends = [_SLOT, _ROOM_SLOT]
    if op.attrs.get("padded_length", -1) == -1:
        ends.append(_PLACES_SLOT)
    return [slot for end in ends for slot in _slots(op.type, end)]


def measures(op_type: str) -> bool:
    """Whether operators of a type need to know how long the longest sequence is."""
    return bool(_slots(op_type, _PLACES_SLOT) or _slots(op_type, _ROOM_SLOT))


def _slots(op_type: str, end: str) -> list[str]:
    schema = schema_of(op_type)
    return [s.name for s in schema.inputs if s.name.endswith(end)] if schema else []
