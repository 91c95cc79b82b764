"""Rewrites of an IR program at lowering: seeds of random operators, reads of sub-blocks.

An operator with a seed of its own uses that seed. The initializer of a persistable variable is
keyed only by the program's `random_seed` and the variable's name, so a startup program produces the
same values whenever and in whichever executor it runs. Layer names are numbered across programs
(`fc_0.w_0`, then `fc_5.w_0`), so the key is the layer's position among those of its kind: a
rebuilt network starts from the same values. Without a `random_seed` the key includes the run
number, which starts differently in each executor. Any other random operator, such as dropout, is
keyed by the run number and its position in the program; in a block that backward recomputes it
draws the same numbers, and each trip of a loop draws its own.

Hence a parameter has the same initial value in every program that initializes it, and a server that
holds some of its rows draws the whole and keeps its rows: any number of servers start with the bits
of one process (fluid draws each slice anew from the same seed).

Lengths of sequences and the run number are added at lowering to the operators that read them, and
to the enclosing operators of their blocks.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.analysis.placement.sliced_layout import known_shape, rows_of_slices, server_variables
from jaxfleet.fluid.framework.sequence_lengths import lengths_name, source_name
from jaxfleet.ir import Attrs, Block, Kind, Operands, Operator, Program, Variable
from jaxfleet.ops.fluid import RANDOM_OPS, RUN_SLOT, schema_of
from jaxfleet.ops.fluid.arrays import DRAWS_AS
from jaxfleet.ops.fluid.arrays import RUN as RUN
from jaxfleet.ops.fluid.control_flow import BESIDE

PLACES = "layer_places"  # in a server's facts: `layer_positions` of the whole startup program
_APART = 0x9E3779B9  # between the run numbers of devices: odd, and larger than any count of runs
_WORD = 1 << 32
_WHOLE = "@WHOLE"  # the suffix of a parameter of which a server keeps some rows
_OF_LAYER = re.compile(r"(?P<kind>.+)_(?P<count>\d+)\.(?P<part>[wb]_\d+)")
_GIVEN = "assign_value"  # initializes with given values, of which a server keeps its rows too


@dataclass(frozen=True)
class _Cut:
    """The rows of a parameter from `start`, out of `rows`."""

    param: str
    start: int
    rows: int


def device_run_numbers(run: np.uint32, count: int) -> list[np.uint32]:
    """Returns a distinct run number for each device, so that each draws its own numbers."""
    return [np.uint32((int(run) + _APART * place) % _WORD) for place in range(count)]


def with_seeds(program: Program, random_seed: int = 0) -> Program:
    """Gives each random operator its seed, and cuts the parameters that servers initialize."""
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
            # An operator with a seed set by the script draws from that seed.
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


def layer_positions(program: Program) -> tuple[tuple[str, str], ...]:
    """Returns parameters with the names that they would have in the first program built.

    Parameters that already have these names, or that a script named, are left out.
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
    """Yields `layer_positions` of the whole program, of which this may be a part."""
    noted = program.attrs.get(PLACES)
    if noted is None:
        yield from layer_positions(program)
        return
    assert isinstance(noted, tuple)
    for pair in noted:
        match pair:
            case (str(name), str(first)):
                yield name, first


def _number_of(name: str, random_seed: int) -> int:
    text = f"{random_seed} {name}" if random_seed else name
    return zlib.crc32(text.encode()) >> 1 or 1  # as a seed, 0 means none


def _cuts(program: Program) -> Mapping[str, _Cut]:
    """Returns the position in its parameter of each slice that a server initializes."""
    rows = rows_of_slices(program)
    return {
        name: _Cut(param, start, sum(rows[param]))
        for name, (param, start) in server_variables(program).items()
        if start >= 0 and param in rows
    }


def _with_cuts(program: Program, cuts: Mapping[str, _Cut]) -> Block:
    """Returns block 0 drawing whole parameters and keeping the local rows."""
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
            kept, name=name + _WHOLE, kind=Kind.TEMP, shape=(cuts[name].rows, *kept.shape[1:])
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


def close_sub_blocks(program: Program) -> Program:
    """Returns a program whose operators list all data that their sub-blocks read."""
    if len(program.blocks) == 1:
        return program
    blocks = list(program.blocks)
    for index in range(len(blocks) - 1, -1, -1):  # inner blocks have higher numbers
        uses = OuterUses(program.with_blocks(blocks))
        ops = [_closed(program, uses, op) for op in blocks[index].ops]
        blocks[index] = blocks[index].with_ops(ops)
    return program.with_blocks(blocks)


def _closed(program: Program, uses: OuterUses, op: Operator) -> Operator:
    schema = schema_of(op.type)
    if not op.blocks or schema is None or all(slot.name != BESIDE for slot in schema.inputs):
        return op
    listed = () if "reads" in op.attrs else op.reads
    inner = {name for index in op.blocks for name in uses.of_block(index).reads}
    data = {v.name for v in program.of_kind(Kind.DATA)}
    beside = {name for name in inner if name in data or name == lengths_name(source_name(name))}
    more = tuple(sorted(beside - {*listed}))
    if not more:
        return op
    inputs = Operands((*op.inputs.slots, (BESIDE, more)))
    attrs = Attrs({**op.attrs, BESIDE.lower(): more}) if "reads" in op.attrs else op.attrs
    return replace(op, inputs=inputs, attrs=attrs)
