"""What random operators draw: a seed for each, and the rows that a parameter server keeps.

An operator with a seed of its own draws by that. What begins a variable that outlives the run
draws by the program's `random_seed` and the variable's name, and by nothing else: a startup
program begins alike each time that it runs, whatever ran before it and in whichever executor.
Names that layers were given count on from program to program (`fc_0.w_0`, then `fc_5.w_0`), so it
is the layer's place among those of its kind that counts: a net that is built again begins alike.
Without a `random_seed` it draws by the number of the run too, whose first is another in each
executor. Any other operator, a dropout, draws by the number of the run, which the `random_seed`
begins, and by its place in the program; one in a block that backward runs again draws the same
there, and each turn of a loop draws its own.

So a parameter begins alike in every program that begins it, and a server that holds some of its
rows draws the whole and keeps those: any number of servers begin with the bits of one, and of one
process (semantics, 30.5; fluid drew each slice anew, by the same seed).
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxfleet.analysis.slices import held_parts, known_shape, rows_of_slices
from jaxfleet.ir import Attrs, Block, Kind, Operands, Operator, Program, Variable
from jaxfleet.ops.fluid import RANDOM_OPS, RUN_SLOT
from jaxfleet.ops.fluid.random import DRAWS_AS
from jaxfleet.ops.fluid.random import RUN as RUN

PLACES = "layer_places"  # in a server's facts: what `layer_places` returned of the whole startup
_APART = 0x9E3779B9  # between devices' numbers of a run: odd, and far from a number of runs
_WORD = 1 << 32
_WHOLE = "@WHOLE"  # the suffix of a parameter of which a server keeps some rows
_OF_LAYER = re.compile(r"(?P<kind>.+)_(?P<count>\d+)\.(?P<part>[wb]_\d+)")
_GIVEN = "assign_value"  # begins with given values, of which a server keeps its rows too


@dataclass(frozen=True)
class _Cut:
    """Some rows of a parameter.

    Attributes:
        param: it.
        start: the first of them.
        rows: of the whole parameter.
    """

    param: str
    start: int
    rows: int


def numbers_apart(run: np.uint32, count: int) -> list[np.uint32]:
    """Returns a number of the run for each of several devices, so that each draws its own."""
    return [np.uint32((int(run) + _APART * place) % _WORD) for place in range(count)]


def with_draws(program: Program, random_seed: int = 0) -> Program:
    """Gives each random operator what it draws by; cuts what servers begin.

    Args:
        program: it.
        random_seed: the program's; 0 for none.
    """
    ops = [op for block in program.blocks for op in block.ops]
    if not any(op.type in RANDOM_OPS or op.type == _GIVEN for op in ops):
        return program
    cuts = _cuts(program)
    program = program.with_block(_with_cuts(program, cuts)) if cuts else program
    if not any(op.type in RANDOM_OPS for op in ops):
        return program
    blocks, number, places = [], 0, dict(_places(program))
    for block in program.blocks:
        made = []
        for op in block.ops:
            number += op.type != "delete_var"  # release_memory changes no draw
            # What the script gave a seed draws by that.
            is_given = op.type not in RANDOM_OPS or op.attrs.get("seed")
            own = int(str(op.attrs.get(DRAWS_AS, number)))
            seeded = op if is_given else _with_seed(program, cuts, op, own, random_seed, places)
            made.append(seeded)
        blocks.append(block.with_ops(made))
    program = replace(program, blocks=tuple(blocks))
    if not any(RUN in op.reads for block in blocks for op in block.ops):
        return program
    run = Variable(RUN, "u32", (), Kind.DATA)
    return replace(program, variables={**program.variables, RUN: run})


def _with_seed(
    program: Program,
    cuts: Mapping[str, _Cut],
    op: Operator,
    number: int,
    random_seed: int,
    places: Mapping[str, str],
) -> Operator:
    name = op.writes[0].removesuffix(_WHOLE)
    begun = program.variables.get(name)
    if begun is not None and begun.kind in {Kind.PARAM, Kind.STATE}:
        whole = cuts[name].param if name in cuts else name
        number = _number_of(places.get(whole, whole) if random_seed else whole, random_seed)
        if random_seed:
            return replace(op, attrs=Attrs({**op.attrs, "seed": number}))
    inputs = Operands((*op.inputs.slots, (RUN_SLOT, (RUN,))))
    return replace(op, inputs=inputs, attrs=Attrs({**op.attrs, "seed": number}))


def layer_places(program: Program) -> tuple[tuple[str, str], ...]:
    """Returns parameters with the names that they would have, were this the first program built.

    Left out are those that have these names, and those that a script has named.
    """
    found = [(_OF_LAYER.fullmatch(name), name) for name in program.variables]
    counts: dict[str, set[int]] = {}
    for match, _ in found:
        if match:
            counts.setdefault(match["kind"], set()).add(int(match["count"]))
    places = {kind: {n: at for at, n in enumerate(sorted(own))} for kind, own in counts.items()}
    renamed = (
        (name, f"{match['kind']}_{places[match['kind']][int(match['count'])]}.{match['part']}")
        for match, name in found
        if match
    )
    return tuple((name, first) for name, first in renamed if name != first)


def _places(program: Program) -> Iterator[tuple[str, str]]:
    """Yields what `layer_places` returned of the whole program, of which this may be a part."""
    noted = program.attrs.get(PLACES)
    if noted is None:
        yield from layer_places(program)
        return
    assert isinstance(noted, tuple)
    for pair in noted:
        match pair:
            case (str(name), str(first)):
                yield name, first


def _number_of(name: str, random_seed: int) -> int:
    text = f"{random_seed} {name}" if random_seed else name
    return zlib.crc32(text.encode()) >> 1 or 1  # a seed, and 0 is none


def _cuts(program: Program) -> Mapping[str, _Cut]:
    """Returns where the slices that a server begins lie in their parameters."""
    rows = rows_of_slices(program)
    return {
        name: _Cut(param, start, sum(rows[param]))
        for name, (param, start) in held_parts(program).items()
        if start >= 0 and param in rows
    }


def _with_cuts(program: Program, cuts: Mapping[str, _Cut]) -> Block:
    """Returns block 0 where it draws whole parameters, and keeps the rows that are here."""
    ops: list[Operator] = []
    wholes: list[Variable] = []
    for op in program.root.ops:
        name = op.writes[0] if op.writes else ""
        is_begun = op.type in RANDOM_OPS or op.type == _GIVEN
        kept = program.variables.get(name)
        if name not in cuts or not is_begun or kept is None or kept.shape[0] == cuts[name].rows:
            ops.append(op)
            continue
        whole = replace(
            kept,
            name=name + _WHOLE,
            kind=Kind.TEMP,
            shape=(cuts[name].rows, *kept.shape[1:]),
        )
        wholes.append(whole)
        ops += _drawn_and_cut(op, whole, kept, cuts[name].start)
    return program.root.with_ops(ops, declare=wholes)


def _drawn_and_cut(op: Operator, whole: Variable, kept: Variable, start: int) -> Iterator[Operator]:
    shape = known_shape(kept)
    yield replace(
        op,
        outputs=op.outputs.renamed({kept.name: whole.name}),
        attrs=Attrs({**op.attrs, "shape": whole.shape}),
    )
    yield Operator(
        "jax.slice",
        Operands.of(whole.name),
        Operands.of(kept.name),
        Attrs({
            "start_indices": (start, *(0 for _ in shape[1:])),
            "limit_indices": (start + shape[0], *shape[1:]),
            "strides": None,
        }),
        role=op.role,
        source=op.source,
    )  # fmt: skip
