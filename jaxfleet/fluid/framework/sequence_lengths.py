"""Variables for the lengths of sequences (LoD level 1), whose rows are stored consecutively.

A variable declared with `lod_level=1` is fed as a LoDTensor, or as a list of sequences. On the
device it is two arrays: the rows of all sequences, `[rows, ...]`, which fluid's operators read, and
the lengths, `i32[b]`, under the variable's name with `@LENGTHS`.

The number of rows is a size with a letter of the variable's own. Shape inference propagates
letters, so a variable with as many rows has the same sequences, and no operator needs a rule for
that: an embedding of words, an `fc` of it, and the gradients of both. Operators that need the ends
of sequences (`sequence_pool`) have an additional input slot, `XLengths`. A program under
construction leaves it empty; `with_lengths` fills it when a program is lowered. Two variables that
an operator reads row by row have equally many rows and share one letter (`join_rows`); they must be
fed with equal lengths.

XLA would compile a program for each number of rows. So rows are padded with copies of the last one,
up to the next of a few numbers, wherever that changes no result (`lowering.lod_values`): where all
readers work row by row or read the lengths. A `mean` over the words of a batch does not, and such a
program is compiled for each number of rows. Fetched values have their own rows only.

An operator that makes sequences of other lengths (`sequence_slice`) has an additional output slot,
`OutLengths`. Where no size of the inputs distinguishes its rows from theirs (a slice of `x` has at
most the rows of `x`), some rows are spare and belong to no sequence; they show in the size, as in
`x_rows+1`. An operator that puts each sequence on a row of an array needs the length of the longest
one: its slot `XPlaces` takes that many numbers, or `XRoom` at least as many, since arrays then have
fewer distinct sizes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.to_ir import UNKNOWN
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.ir import Block, Kind, Operands, Size, evaluate
from jaxfleet.ir import Operator as IrOperator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ir import Variable as IrVariable
from jaxfleet.ir.dims import Dim, letter, substitute
from jaxfleet.ops.fluid import schema_of

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.program import Program

OUT_LENGTHS = "OutLengths"


def made_sequences(program: "Program") -> Iterator[tuple[Operator, Variable]]:
    """Yields the operators that create sequences of new lengths, each with its output."""
    for block in program.blocks:
        for op in block.ops:
            if outputs_lengths(op.type):
                yield op, block._var_recursive(op.output("Out")[0])


def outputs_lengths(op_type: str) -> bool:
    """Whether operators of a type output the lengths of their results."""
    schema = schema_of(op_type)
    return schema is not None and any(slot.name == OUT_LENGTHS for slot in schema.outputs)


def spare_rows(size: Size) -> int:
    """Returns how many rows of a size are spare regardless of the feed."""
    return evaluate(size, dict.fromkeys(size.letters, 0)) if isinstance(size, Dim) else 0


def spare_rows_needed(program: "Program", size: Size) -> int:
    """Returns how many spare rows distinguish sequences of this size from all others."""
    taken = {spare_rows(made.sizes[0]) for _, made in made_sequences(program) if made.sizes}
    here = spare_rows(size)
    return next(more for more in range(1, len(taken) + 2) if here + more not in taken)


if TYPE_CHECKING:
    from jaxfleet.fluid.framework.program import Program

T = TypeVar("T")

_LENGTHS, _PLACES, _ROOM = "@LENGTHS", "@PLACES", "@ROOM"
# Suffixes of slots for the lengths of another slot's sequences (XLengths), or for their places.
_SLOT, _PLACES_SLOT, _ROOM_SLOT = "Lengths", "Places", "Room"
_SHORTEN = frozenset({"sequence_slice", "sequence_erase"})  # make no sequence longer


def lengths_name(name: str) -> str:
    """Returns the name of the variable with the lengths of another's sequences."""
    return name + _LENGTHS


def source_name(name: str) -> str:
    """Returns the name of the variable to which a lengths variable belongs."""
    return name.removesuffix(_LENGTHS)


def places_name(name: str) -> str:
    """Returns the name of the variable with as many places as the longest sequence has rows."""
    return name + _PLACES


def room_name(name: str) -> str:
    """Returns the name of the variable with at least as many places as the longest sequence."""
    return name + _ROOM


def longest_of(source: Variable) -> Size:
    """Returns the size for the length of the longest sequence fed to a variable."""
    return _own_letter(source, "longest")


def room_for(variable: Variable) -> Size:
    """Returns the number of places reserved for the longest of a variable's sequences."""
    assert variable.sizes
    fed = fed_source(variable)
    return variable.sizes[0] if fed is None else _own_letter(fed, "room")


def levels_size(source: Variable) -> Size:
    """Returns the size of the levels array of a fed variable of two levels."""
    return _own_letter(source, "levels")


def _own_letter(source: Variable, what: str) -> Size:
    assert source.sizes
    return letter(f"{str(source.sizes[0]).removesuffix('_rows')}_{what}")


def source_of(variable: Variable, ragged: Mapping[str, T]) -> T | None:
    """Returns the fed variable whose sequences a variable shares; None if it has none.

    `ragged` has the variables fed as sequences, or their names, by the letter of their rows.
    """
    return ragged.get(str(variable.sizes[0])) if variable.sizes else None


def ragged_data(program: "Program") -> dict[str, Variable]:
    """Returns the sources of one-level sequence lengths by their number of rows.

    These are fed variables, by their letter, and outputs of operators that create sequences.
    """
    return {rows: v for rows, v in _sources(program).items() if v.lod_level < 2}


def nested_data(program: "Program") -> dict[str, Variable]:
    """Returns the variables fed as sequences of two levels, by their number of rows."""
    return {rows: v for rows, v in _sources(program).items() if v.lod_level > 1}


def _sources(program: "Program") -> dict[str, Variable]:
    found = {rows: data[0] for rows, data in data_by_rows(program).items()}
    for _, made in made_sequences(program):
        if made.sizes:
            found.setdefault(str(made.sizes[0]), made)
    return found


def fed_source(variable: Variable) -> Variable | None:
    """Returns the fed variable whose longest sequence bounds those of a variable."""
    program, source = variable.block.program, variable
    makers = {name: op for op, made in made_sequences(program) for name in [made.name]}
    while (found := source_of(source, ragged_data(program))) is not None and not found.is_data:
        maker = makers[found.name]
        if maker.type not in _SHORTEN:
            return None
        source = maker.block._var_recursive(maker.input("X")[0])
    return found


def data_by_rows(program: "Program") -> dict[str, list[Variable]]:
    """Groups the variables fed as sequences of equal lengths by their number of rows."""
    found: dict[str, list[Variable]] = {}
    for variable in program.global_block().vars.values():
        if variable.is_data and variable.lod_level and variable.sizes:
            found.setdefault(str(variable.sizes[0]), []).append(variable)
    return found


def join_rows(program: "Program", variables: Iterable[Variable]) -> bool:
    """Declares that the sequences of some variables have equal lengths; False for only one.

    An operator that works row by row on two of them (a sum of embeddings of words and of their
    contexts) implies it. Fluid finds out at run time; here it is checked when they are fed. Grouped
    rows (`reshape` of words to `[-1, 5]`) likewise match the rows with which they are combined.
    """
    met = list(variables)
    known = _sources(program)
    sources = [source_of(v, known) for v in met]
    fed = {str(v.sizes[0]): v for v in sources if v is not None and v.sizes}
    groups = list(dict.fromkeys(str(v.sizes[0]) for v in met if v.sizes and _is_grouped(v)))
    if len(fed) + len(groups) < 2 or not all(v.is_data for v in fed.values()):
        return False
    joined = list(fed.values())
    if len({v.lod_level for v in joined}) > 1:
        return False
    same = {
        str(_own_letter(other, what)): _own_letter(joined[0], what)
        for other in joined[1:]
        for what in ("rows", "longest", "levels")
    }
    rows = _own_letter(joined[0], "rows") if joined else letter(groups[0])
    same |= dict.fromkeys(groups, rows)
    for block in program.blocks:
        for variable in block.vars.values():
            if variable.sizes is not None:
                variable.sizes = tuple(substitute(size, same) for size in variable.sizes)
        for op in block.ops:
            if op.type == "new_array":
                op._set_attr("shape", [substitute(size, same) for size in op.attr("shape")])
                op._set_attr("levels", substitute(op.attr("levels"), same))
    program.version += 1
    return True


def _is_grouped(variable: Variable) -> bool:
    rows = str(variable.sizes[0]) if variable.sizes else ""
    return rows.isidentifier() and rows.endswith(UNKNOWN)


def with_lengths(made: IrProgram, program: "Program") -> IrProgram:
    """Connects the length inputs and outputs of operators on sequences."""
    ragged = ragged_data(program)
    if not ragged:
        return made
    aside = {rows: _Aside.of(source) for rows, source in ragged.items()}
    blocks = tuple(_with_lengths(made, block, aside) for block in made.blocks)
    used = {name for block in blocks for op in block.ops for name in op.reads}
    sources = [v for v in ragged.values() if v.is_data]
    places = [
        (place(v.name), size)
        for v in sources
        for place, size in (
            (lengths_name, letter("b")),
            (places_name, longest_of(v)),
            (room_name, _own_letter(v, "room")),
        )
    ]
    added = {n: IrVariable(n, "i32", (size,), Kind.DATA) for n, size in sorted(places) if n in used}
    return replace(made, variables={**made.variables, **added}, blocks=blocks)


@dataclass(frozen=True)
class _Aside:
    """Names of the variables beside sequences, by the suffix of the slot that reads them."""

    names: Mapping[str, str | None]

    @classmethod
    def of(cls, source: Variable) -> "_Aside":
        fed = source if source.is_data else fed_source(source)
        places, room = (places_name(source.name), room_name(fed.name)) if fed else (None, None)
        exact = places if source.is_data else None
        return cls({_SLOT: lengths_name(source.name), _PLACES_SLOT: exact, _ROOM_SLOT: room})


def _with_lengths(made: IrProgram, block: Block, aside: Mapping[str, _Aside]) -> Block:
    def filled(op: IrOperator) -> IrOperator:
        slots = [name for name in slots_aside(op) if not op.inputs.slot(name)]
        given = {slot: _names(op, slot) for slot in slots}
        more = [(slot, names) for slot, names in given.items() if names]
        op = replace(op, inputs=Operands((*op.inputs.slots, *more))) if more else op
        if not outputs_lengths(op.type):
            return op
        own = (OUT_LENGTHS, (lengths_name(str(op.outputs.slot("Out")[0])),))
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
    """Returns the slots of an operator type that accept lengths."""
    return _slots(op_type, _SLOT)


def slots_aside(op: IrOperator) -> list[str]:
    """Returns the slots of an operator that accept variables beside sequences.

    A `sequence_pad` with a given row length needs no places.
    """
    ends = [_SLOT, _ROOM_SLOT]
    if op.attrs.get("padded_length", -1) == -1:
        ends.append(_PLACES_SLOT)
    return [slot for end in ends for slot in _slots(op.type, end)]


def measures(op_type: str) -> bool:
    """Whether operators of a type need the length of the longest sequence."""
    return bool(_slots(op_type, _PLACES_SLOT) or _slots(op_type, _ROOM_SLOT))


def _slots(op_type: str, end: str) -> list[str]:
    schema = schema_of(op_type)
    return [s.name for s in schema.inputs if s.name.endswith(end)] if schema else []
