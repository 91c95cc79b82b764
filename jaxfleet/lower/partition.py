"""Partitions a program where it exchanges with servers or contains `cut`.

A segment is a run of operators of block 0 that need no server. The host operators stay unchanged,
for the runtime to execute.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.analysis.placement.sliced_layout import joins_slices
from jaxfleet.analysis.ssa import rewritten_temporaries, used_inside, with_single_assignment
from jaxfleet.ir import Block, Dim, Kind, Operator, Program
from jaxfleet.ir.inline import embed
from jaxfleet.ir.variable import RAW
from jaxfleet.lower.blocks import ExecutableCache, block_key, outer_reads, outer_writes
from jaxfleet.lower.finite import all_finite, is_float, is_parameter
from jaxfleet.ops import Array, Interpreter, find_op

HOST_OPS = frozenset(
    {
        *("split_byref", "send", "send_rows", "send_barrier", "recv", "fetch_barrier", "fetch"),
        *("distributed_lookup_table", "cut", "to_host", "to_device"),
    }
)
SENDING = frozenset({"split_byref", "send", "send_rows"})
_OF_THIS_PROCESS = frozenset({"fetch", "cut", "to_host", "to_device"})
Run: TypeAlias = Callable[..., Sequence[Array]]


@dataclass(frozen=True)
class Segment:
    """Operators that run on the device, as one function."""

    reads: tuple[str, ...]  # the variables that it takes, in order, after the trainer id
    writes: tuple[str, ...]  # the variables that it returns, in order
    run: Run = field(repr=False)  # `(trainer, *reads) -> writes`, compiled at the first call
    # `run` returns one more value, `bool[2]`: whether its input parameters are finite, and whether
    # its sent or parameter outputs are, gradients among them
    is_watched: bool = False


def runs_on_host(op: Operator) -> bool:
    """Whether an operator of a trainer's program is executed by the runtime."""
    if op.type in HOST_OPS or joins_slices(op):
        return True
    return "endpoint" in op.attrs and find_op(op).traits.is_collective


def segments(
    program: Program, sizes: Mapping[str, int], *, cache: ExecutableCache
) -> tuple[Program, list[Segment | tuple[Operator, ...]]]:
    """Returns segments, separated by groups of consecutive host operators.

    They come after the program that declares their inputs and outputs. `sizes` contains a number
    for every letter: the rows of this trainer.
    """
    blocks, items = in_blocks(program, sizes)
    sent = sent_by(items)
    made = [
        segment_of(blocks, item, sent, cache) if isinstance(item, int) else item for item in items
    ]
    return blocks, made


def sent_by(items: Sequence[int | tuple[Operator, ...]]) -> frozenset[str]:
    """Returns the variables that the host sends, given the items of `in_blocks`."""
    ops = (op for item in items if not isinstance(item, int) for op in item)
    return frozenset(name for op in ops if op.type in SENDING for name in op.reads)


def count_waits(program: Program) -> int:
    """Returns how often the host waits for servers in a step of a trainer's program."""
    ops = [op for op in program.root.ops if op.type not in _OF_THIS_PROCESS]
    return sum(on_host and any(map(_is_answered, run)) for on_host, run in _runs(ops))


def in_blocks(
    program: Program, sizes: Mapping[str, int]
) -> tuple[Program, list[int | tuple[Operator, ...]]]:
    """Returns a program whose segments are blocks, and their numbers in execution order.

    The program has numbers for sizes and a name for each value; the numbers are separated by groups
    of consecutive host operators.
    """
    bound = _with_a_name_each(_without_releases(_with_numbers(program, sizes)))
    runs = list(_runs(bound.root.ops))
    blocks = _as_blocks(bound, [ops for on_host, ops in runs if not on_host])
    numbers = itertools.count(1)
    return blocks, [tuple(ops) if on_host else next(numbers) for on_host, ops in runs]


def _with_numbers(program: Program, sizes: Mapping[str, int]) -> Program:
    made = embed(program, index=0, inner_from=1, parent=-1, names={}, sizes=sizes)
    return replace(program, variables=made.variables, blocks=(made.root, *made.inner))


def _without_releases(program: Program) -> Program:
    """Returns a program without `delete_var`, which would count as a reader of its operands.

    The runtime releases a value after its last reader anyway, and XLA its own temporaries.
    """
    return program.with_block(
        program.root.with_ops(op for op in program.root.ops if op.type != "delete_var")
    )


def _with_a_name_each(program: Program) -> Program:
    """Returns a program in which values that are made one after another have different names.

    Under one name (as `memory_optimize` assigns) the earlier value would stay alive until the later
    one is dead, and an executable that only passes the later one on would return both. Variables of
    sub-blocks and of the host keep their names.
    """
    uses, kept = OuterUses(program), set[str]()
    for op in program.root.ops:
        kept |= used_inside(op, uses)
        if runs_on_host(op) and op.type not in _OF_THIS_PROCESS:
            kept.update(op.reads, op.writes)
    again = rewritten_temporaries(program) - kept
    return with_single_assignment(
        program, [name for name in again if program.lookup(name).dtype != RAW]
    )


def _runs(ops: Sequence[Operator]) -> Iterator[tuple[bool, list[Operator]]]:
    """Yields the operators in runs: on the host or not, in order.

    The host requests all values that a run receives before it waits for any, so a sender of replies
    (a sum over trainers that a server's learning rate depends on) begins another run.
    """
    waiting: list[Operator] = []
    answers: set[str] = set()
    for op in ops:
        on_host = runs_on_host(op)
        if waiting and (on_host != runs_on_host(waiting[0]) or _needs_answer(op, answers)):
            yield runs_on_host(waiting[0]), waiting
            waiting = []
            answers.clear()
        waiting.append(op)
        if on_host and _is_answered(op):
            answers.update(op.writes)
    if waiting:
        yield runs_on_host(waiting[0]), waiting


def _is_answered(op: Operator) -> bool:
    return op.type == "recv" or "endpoint" in op.attrs


def _needs_answer(op: Operator, answers: set[str]) -> bool:
    is_local = op.type in _OF_THIS_PROCESS or joins_slices(op)
    return not is_local and not answers.isdisjoint(op.reads)


def _as_blocks(program: Program, runs: Sequence[Sequence[Operator]]) -> Program:
    """Returns a program in which every run is a block; shared variables stay in block 0."""
    count = len(runs)
    made = embed(program, index=0, inner_from=1 + count, parent=-1, names={}, sizes={})
    moved = _moved_ops(made.root, runs)
    homes = _homes(made.root, moved)
    blocks = [replace(made.root, ops=(), variables=_of(made.root, homes, 0))]
    parents: dict[int, int] = {}
    for index, ops in enumerate(moved, start=1):
        blocks.append(Block(index, 0, _of(made.root, homes, index), ops=ops))
        parents.update({inner: index for op in ops for inner in op.blocks})
    inner = [replace(b, parent=parents.get(b.index, b.parent)) for b in made.inner]
    return replace(program, variables=made.variables, blocks=(*blocks, *inner))


def _moved_ops(root: Block, runs: Sequence[Sequence[Operator]]) -> list[tuple[Operator, ...]]:
    """Returns the same runs of the embedded operators, whose blocks have new numbers."""
    device = iter(op for op in root.ops if not runs_on_host(op))
    return [tuple(next(device) for _ in run) for run in runs]


def _homes(root: Block, runs: Sequence[Sequence[Operator]]) -> dict[str, int]:
    """Returns the only run that uses each variable, or 0 if several runs or the host do."""
    homes: dict[str, int] = {}
    for op in root.ops:
        if runs_on_host(op):
            homes.update(dict.fromkeys((*op.reads, *op.writes), 0))
    for index, ops in enumerate(runs, start=1):
        for op in ops:
            for name in (*op.reads, *op.writes):
                if homes.setdefault(name, index) != index:
                    homes[name] = 0
    return homes


def _of(root: Block, homes: Mapping[str, int], index: int) -> dict[str, Any]:
    return {name: v for name, v in root.variables.items() if homes.get(name, 0) == index}


def segment_of(
    program: Program, index: int, sent: Collection[str], cache: ExecutableCache
) -> Segment:
    """Returns the segment for a block of `in_blocks`; `sent` is from `sent_by`."""
    block = program.blocks[index]
    reads, writes = outer_reads(program, block), outer_writes(program, block)
    # Outputs that show a non-finite gradient.
    found = (program.lookup(name, block) for name in writes)
    watched = {
        v.name for v in found if (v.name in sent or v.kind is Kind.PARAM) and is_float(v.dtype)
    }
    places = [n for n, name in enumerate(writes) if name in watched]
    key = f"trainer {places}\n{block_key(program, block, reads, writes)}"
    compiled = cache.get(key, lambda: _jitted(program, block, reads, writes, watched))
    return Segment(reads, writes, compiled, bool(watched))


def _jitted(
    program: Program,
    block: Block,
    reads: Sequence[str],
    writes: Sequence[str],
    watched: Collection[str],
) -> Run:
    several = program.attrs.get("devices", 1) != 1

    def run(trainer: Array, *values: Array) -> list[Array]:
        interpreter = Interpreter(program, {}, trainer=trainer if several else None)
        made = run_segment(interpreter, block, reads, writes, values)
        if not watched:
            return made
        taken = [x for name, x in zip(reads, values, strict=True) if is_parameter(program, name)]
        new = [x for name, x in zip(writes, made, strict=True) if name in watched]
        return [*made, jnp.stack([all_finite(taken), all_finite(new)])]

    run.__name__ = f"{program.name}_segment{block.index}"
    return jax.jit(run)


def run_segment(
    interpreter: Interpreter,
    block: Block,
    reads: Sequence[str],
    writes: Sequence[str],
    values: Sequence[Array],
) -> list[Array]:
    """Runs a block on the values of its inputs; returns those of its outputs."""
    held = dict(zip(reads, values, strict=True))
    after = interpreter.run_scope(replace(block, variables=_inner(block, writes)), held)
    return [after[name] for name in writes]


def _inner(block: Block, writes: Sequence[str]) -> dict[str, Any]:
    return {name: v for name, v in block.variables.items() if name not in writes}


def rows_of(program: Program, rows: int) -> dict[str, int]:
    """Returns the number for the batch letter: a trainer's rows."""
    batch = program.attrs.get("batch")
    return dict.fromkeys(batch.letters, rows) if isinstance(batch, Dim) else {}
