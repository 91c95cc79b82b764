"""Lowers a step that says `cut` to several executables, between which memory is let go.

Segments that do the same, names left aside, share an executable: a network of equal layers is
compiled as often as one layer is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxfleet.ir import Block, Kind, Operator, Program, Variable
from jaxfleet.lower.blocks import ExecutableCache, block_key, outer_reads, outer_writes
from jaxfleet.lower.dropping import drops_of
from jaxfleet.lower.moves import Move, moves_of
from jaxfleet.lower.part_layout import PartLayout
from jaxfleet.lower.segments import in_blocks, run_segment
from jaxfleet.ops import Array, Interpreter


@dataclass(frozen=True)
class Part:
    """One executable's turn in a step.

    Attributes:
        reads: the variables that it takes, in order.
        writes: the variables that it returns, in order.
        drops: the variables that nothing reads after it.
        run: jitted, `*reads -> writes`.
        specs: the types of what it takes.
        types: the variables that it takes and returns, with numbers for sizes.
        donated: the variables whose memory its results take.
        moves: what moves between the device and the host before it runs; nobody waits for it.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    drops: tuple[str, ...]
    run: Any = field(repr=False)
    specs: tuple[Any, ...] = field(repr=False)
    types: Mapping[str, Variable] = field(repr=False)
    donated: frozenset[str]
    moves: tuple[Move, ...] = ()

    @property
    def temp_bytes(self) -> int:
        """XLA's `temp_size_in_bytes` of the executable."""
        return int(self.compiled().memory_analysis().temp_size_in_bytes)

    def compiled(self) -> Any:
        """Returns the executable; jax keeps it, for this and for the calls."""
        return self.run.lower(*self.specs).compile()


@dataclass(frozen=True)
class Parts:
    """Makes the parts of a step.

    Attributes:
        program: with `cut` between what is compiled apart.
        layout: where its values lie.
        donated: state whose memory its new value may take.
        kept: variables that are read when the step is over.
        cache: where executables are kept.
    """

    program: Program
    layout: PartLayout
    donated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    cache: ExecutableCache = field(default_factory=ExecutableCache)

    def at(self, sizes: Mapping[str, int]) -> tuple[Part, ...]:
        """Returns the executables of a step, in the order that they run.

        Args:
            sizes: a number for every letter.
        """
        blocks, items = in_blocks(self.program, sizes)
        turns = list(_turns(items))
        uses = [_Used.of(blocks, blocks.blocks[number], moves) for number, moves in turns]
        drops = drops_of(blocks, [used.names for used in uses], self.kept)
        last = {name: place for place, used in enumerate(uses) for name in used.reads}
        found = []
        for place, ((number, moves), used) in enumerate(zip(turns, uses, strict=True)):
            mine = {x for x in self.donated if x in used.writes and last.get(x) == place}
            leaving = {move.of for move in moves}  # what is being copied cannot be written over
            free = [name for name in drops[place] if name not in leaving]
            donated = frozenset(mine | _same_types(used, free))
            run = self._run(blocks, blocks.blocks[number], used, donated)
            specs = tuple(self.layout.spec(used.types[name]) for name in used.reads)
            types = used.types
            found.append(
                Part(used.reads, used.writes, drops[place], run, specs, types, donated, moves)
            )
        return tuple(found)

    def _run(self, program: Program, block: Block, used: "_Used", donated: frozenset[str]) -> Any:
        lies = [self.layout.lies(used.types[name]) for name in (*used.reads, *used.writes)]
        text = block_key(program, block, used.reads, used.writes, donated)
        key = "\n".join([*lies, text])
        return self.cache.get(key, lambda: self._jitted(program, block, used, donated))

    def _jitted(self, program: Program, block: Block, used: "_Used", donated: Any) -> Any:
        reads, writes, axis = used.reads, used.writes, self.layout.axis_name

        def body(values: Sequence[Array]) -> list[Array]:
            interpreter = Interpreter(program, {}, axis_name=axis)
            return run_segment(interpreter, block, reads, writes, values)

        types = used.types
        function = self.layout.jit(body, [types[x] for x in reads], [types[x] for x in writes])
        function.__name__ = f"{program.name}_part{block.index}"
        return jax.jit(function, donate_argnums=[n for n, x in enumerate(reads) if x in donated])


def _turns(
    items: Iterable[int | tuple[Operator, ...]],
) -> Iterator[tuple[int, tuple[Move, ...]]]:
    """Yields the blocks of a program's executables, with what moves before each."""
    moves: tuple[Move, ...] = ()
    for item in items:
        if isinstance(item, int):
            yield item, moves
            moves = ()
        else:
            moves += moves_of(item)


@dataclass(frozen=True)
class _Used:
    """What a block takes and returns, with types, and all names that it and its moves use."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    names: tuple[str, ...]
    types: Mapping[str, Variable]

    @classmethod
    def of(cls, program: Program, block: Block, moves: Sequence[Move]) -> "_Used":
        reads, writes = outer_reads(program, block), outer_writes(program, block)
        names = (*(x for move in moves for x in (move.of, move.to)), *reads, *writes)
        return cls(reads, writes, names, {name: program.lookup(name, block) for name in names})


def _same_types(used: _Used, drops: Sequence[str]) -> set[str]:
    """Returns what is dropped and can give its memory to a temporary that is made."""
    made = [used.types[x] for x in used.writes if x not in used.reads]
    free = Counter(str(v.type) for v in made if v.kind is Kind.TEMP)
    found = set()
    for name in used.reads:
        text = str(used.types[name].type)
        if name in drops and free[text] > 0:
            free[text] -= 1
            found.add(name)
    return found
