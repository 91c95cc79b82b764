"""The executables of a trainer's program, for XLA's memory analysis."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxfleet.ir import Program
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.lower.host_transfer import Move, device_dtype, moves_of
from jaxfleet.lower.partition import in_blocks, segment_of, sent_by
from jaxfleet.lower.staged import Stage, last_uses


def trainer_stages(
    program: Program, sizes: Mapping[str, int], kept: Sequence[str], cache: ExecutableCache
) -> tuple[Stage, ...]:
    """Returns the executables of a trainer's program, in execution order.

    Between them the host does its part. A value that the host reads last counts as dropped by the
    executable before: it is released before the next one. The variables in `kept` are read after
    the step.
    """
    blocks, items = in_blocks(program, sizes)
    found: list[Stage] = []
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
    for item, drops in zip(items, last_uses(blocks, uses, kept), strict=True):
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
) -> Stage:
    segment, block = segment_of(program, index, sent, cache), program.blocks[index]
    moved = [name for move in moves for name in (move.of, move.to)]
    names = (*segment.reads, *segment.writes, *moved)
    types = {name: program.lookup(name, block) for name in names}
    specs = [jax.ShapeDtypeStruct((), np.int32)]  # the trainer id
    for name in segment.reads:
        shape = tuple(int(size) for size in types[name].shape if isinstance(size, int))
        specs.append(jax.ShapeDtypeStruct(shape, device_dtype(types[name].dtype)))
    reads, writes, run = segment.reads, segment.writes, segment.run
    return Stage(reads, writes, (), run, tuple(specs), types, frozenset(), moves)
