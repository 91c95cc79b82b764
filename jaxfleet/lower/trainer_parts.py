"""The executables of a trainer's program, so that xla can say what each takes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxfleet.ir import Program
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.lower.dropping import drops_of
from jaxfleet.lower.host_arrays import device_dtype
from jaxfleet.lower.moves import Move, moves_of
from jaxfleet.lower.segmented import Part
from jaxfleet.lower.segments import in_blocks, segment_of, sent_by


def trainer_parts(
    program: Program, sizes: Mapping[str, int], kept: Sequence[str], cache: ExecutableCache
) -> tuple[Part, ...]:
    """Returns the executables of a trainer's program, in the order that they run.

    Between them the host does its part. What it is the last to read counts as dropped by the
    executable before it: the next one finds it gone.

    Args:
        program: a trainer's.
        sizes: a number for every letter: the rows of this trainer.
        kept: variables that are read when the step is over.
        cache: where executables are kept.
    """
    blocks, items = in_blocks(program, sizes)
    found: list[Part] = []
    uses: list[Sequence[str]] = []
    moves: tuple[Move, ...] = ()
    sent = sent_by(items)
    for item in items:
        if isinstance(item, int):
            found.append(_part(blocks, item, sent, cache, moves))
            moves = ()
            uses.append((*found[-1].reads, *found[-1].writes))
        else:
            moves += moves_of(item)
            uses.append([name for op in item for name in (*op.reads, *op.writes)])
    count = 0
    for item, drops in zip(items, drops_of(blocks, uses, kept), strict=True):
        count += isinstance(item, int)
        if count:
            found[count - 1] = replace(found[count - 1], drops=(*found[count - 1].drops, *drops))
    return tuple(found)


def _part(
    program: Program,
    index: int,
    sent: Collection[str],
    cache: ExecutableCache,
    moves: tuple[Move, ...],
) -> Part:
    segment, block = segment_of(program, index, sent, cache), program.blocks[index]
    moved = [name for move in moves for name in (move.of, move.to)]
    names = (*segment.reads, *segment.writes, *moved)
    types = {name: program.lookup(name, block) for name in names}
    specs = [jax.ShapeDtypeStruct((), np.int32)]  # which trainer this is
    for name in segment.reads:
        shape = tuple(int(size) for size in types[name].shape if isinstance(size, int))
        specs.append(jax.ShapeDtypeStruct(shape, device_dtype(types[name].dtype)))
    reads, writes, run = segment.reads, segment.writes, segment.run
    return Part(reads, writes, (), run, tuple(specs), types, frozenset(), moves)
