"""Steps in several executables, which release memory between them, and the peak of one.

Segments that are equal up to names share an executable: a network of equal layers is compiled as
often as one layer is.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxfleet.analysis.memory.costs import bytes_of
from jaxfleet.ir import Block, Kind, Operator, Program, Variable
from jaxfleet.lower.blocks import ExecutableCache, block_key, outer_reads, outer_writes
from jaxfleet.lower.function import bind_sizes
from jaxfleet.lower.host_transfer import Move, device_dtype, finish_moves, moves_of, start_moves
from jaxfleet.lower.partition import in_blocks, run_segment, segment_of, sent_by
from jaxfleet.lower.staged_sharding import StagedLayout
from jaxfleet.ops import Array, Interpreter


def last_uses(
    program: Program, uses: Sequence[Iterable[str]], kept: Collection[str]
) -> list[tuple[str, ...]]:
    """Returns, for each part of a step, the temporaries that no later part reads.

    Args:
        program: the step's.
        uses: for each part, the names that it reads or writes.
        kept: variables that are read after the step.
    """
    last = {name: place for place, names in enumerate(uses) for name in names}
    found: list[list[str]] = [[] for _ in uses]
    for name, place in last.items():
        if name not in kept and program.lookup(name).kind is Kind.TEMP:
            found[place].append(name)
    return [tuple(names) for names in found]


@dataclass(frozen=True)
class Stage:
    """One executable's run in a step."""

    reads: tuple[str, ...]  # the variables that it takes, in order
    writes: tuple[str, ...]  # the variables that it returns, in order
    drops: tuple[str, ...]  # the variables that no later stage reads
    run: Any = field(repr=False)  # jitted, `*reads -> writes`
    specs: tuple[Any, ...] = field(repr=False)  # the types of its inputs
    # Its inputs and outputs, with numbers for sizes
    types: Mapping[str, Variable] = field(repr=False)
    donated: frozenset[str]  # the variables whose memory its results reuse
    moves: tuple[Move, ...] = ()  # the asynchronous moves between device and host before it runs

    @property
    def temp_bytes(self) -> int:
        """XLA's `temp_size_in_bytes` of the executable."""
        return int(self.compiled().memory_analysis().temp_size_in_bytes)

    def compiled(self) -> Any:
        """Returns the executable, which jax caches for calls too."""
        return self.run.lower(*self.specs).compile()


@dataclass(frozen=True)
class Stages:
    """Builds the parts of a step."""

    program: Program  # with `cut` between its executables
    layout: StagedLayout  # of its values
    donated: tuple[str, ...] = ()  # state whose memory its new value may reuse
    kept: tuple[str, ...] = ()  # variables that are read after the step
    cache: ExecutableCache = field(default_factory=ExecutableCache)  # for the executables

    def at(self, sizes: Mapping[str, int]) -> tuple[Stage, ...]:
        """Returns the executables of a step in execution order, given a number for every letter."""
        blocks, items = in_blocks(self.program, sizes)
        turns = list(_turns(items))
        uses = [_Used.of(blocks, blocks.blocks[number], moves) for number, moves in turns]
        drops = last_uses(blocks, [used.names for used in uses], self.kept)
        last = {name: place for place, used in enumerate(uses) for name in used.reads}
        found = []
        for place, ((number, moves), used) in enumerate(zip(turns, uses, strict=True)):
            mine = {x for x in self.donated if x in used.writes and last.get(x) == place}
            leaving = {move.of for move in moves}  # a value being copied must not be overwritten
            free = [name for name in drops[place] if name not in leaving]
            donated = frozenset(mine | _same_types(used, free))
            run = self._run(blocks, blocks.blocks[number], used, donated)
            specs = tuple(self.layout.spec(used.types[name]) for name in used.reads)
            types = used.types
            found.append(
                Stage(used.reads, used.writes, drops[place], run, specs, types, donated, moves)
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


def _turns(items: Iterable[int | tuple[Operator, ...]]) -> Iterator[tuple[int, tuple[Move, ...]]]:
    """Yields the blocks of a program's executables, with the moves before each."""
    moves: tuple[Move, ...] = ()
    for item in items:
        if isinstance(item, int):
            yield item, moves
            moves = ()
        else:
            moves += moves_of(item)


@dataclass(frozen=True)
class _Used:
    """The inputs and outputs of a block, with types, and all names that it and its moves use."""

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
    """Returns the dropped values that can donate their memory to a new temporary."""
    made = [used.types[x] for x in used.writes if x not in used.reads]
    free = Counter(str(v.type) for v in made if v.kind is Kind.TEMP)
    found = set()
    for name in used.reads:
        text = str(used.types[name].type)
        if name in drops and free[text] > 0:
            free[text] -= 1
            found.add(name)
    return found


@dataclass(frozen=True)
class Peak:
    """The peak memory of a step, its inputs and outputs excluded."""

    bytes: int  # on one device
    part: int  # the number of the executable that ran then
    alive: Mapping[str, int]  # the temporaries kept between executables then, and their bytes
    temp_bytes: int  # of the executable
    curve: tuple[int, ...]  # the bytes while each executable runs, in order
    host_bytes: int = 0  # the peak in pinned memory of the host, for one device


def peak_of(parts: Sequence[Stage], returned: Sequence[str]) -> Peak:
    """Returns the peak of a step from XLA's analysis of each executable; compiles them.

    The temporaries in `returned` are outputs of the step, which are not counted.
    """
    held: dict[str, int] = {}
    on_host, most_on_host = dict[str, int](), 0
    temps: dict[int, int] = {}
    found: list[tuple[int, dict[str, int], int]] = []
    for part in parts:
        if id(part.run) not in temps:
            temps[id(part.run)] = part.temp_bytes
        sent = [move.to for move in part.moves if move.leaves]
        on_host.update((name, bytes_of(part.types[name], {})) for name in sent)
        most_on_host = max(most_on_host, sum(on_host.values()))
        made = {
            name: bytes_of(part.types[name], {})
            for name in (*part.writes, *(move.to for move in part.moves if not move.leaves))
            if part.types[name].kind is Kind.TEMP and name not in returned
        }
        during = {**held, **made}
        given = sum(held.get(name, 0) for name in part.donated)
        temp = temps[id(part.run)]
        found.append((sum(during.values()) - given + temp, during, temp))
        held = {name: size for name, size in during.items() if name not in part.drops}
        on_host = {name: size for name, size in on_host.items() if name not in part.drops}
    place = max(range(len(found)), key=lambda n: found[n][0])
    total, alive, temp = found[place]
    curve = tuple(size for size, _, _ in found)
    return Peak(total, place, alive, temp, curve, most_on_host)


def peak_of_one(executable: Any) -> Peak:
    """Returns the peak of a step that is one executable, from XLA's analysis."""
    temp = int(executable.memory_analysis().temp_size_in_bytes)
    return Peak(temp, 0, {}, temp, (temp,))


def count_runs(runs: Sequence[Any]) -> tuple[int, int]:
    """Returns the number of executables run in sequence, and the number of distinct ones."""
    return len(runs), len(set(map(id, runs)))


@dataclass
class StagedStep:
    """A step in parts, on lists of leaves: `(given, kept, data) -> (written, fetched)`."""

    program: Program  # with `cut` between its executables
    given: tuple[str, ...]  # the state whose memory the new state may reuse
    kept: tuple[str, ...]  # the other state
    data: tuple[str, ...]  # the fed variables
    written: tuple[str, ...]  # the new state
    fetched: tuple[str, ...]  # the fetched variables
    layout: StagedLayout  # of the values
    # Wait for each part; executables with collectives must not overlap on a CPU
    waits: bool = False
    cache: ExecutableCache = field(default_factory=ExecutableCache)  # for the executables
    _plans: dict[tuple[Any, ...], tuple[Stage, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = Stages(self.program, self.layout, self.given, self.fetched, self.cache)
        self._out = self.layout.fetched([self.program.lookup(name) for name in self.fetched])

    def __call__(
        self, given: Sequence[Array], kept: Sequence[Array], data: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        values = dict(zip((*self.given, *self.kept), (*given, *kept), strict=True))
        values.update(zip(self.data, data, strict=True))
        for part in self.at([np.shape(x) for x in data]):
            leaving = start_moves(part.moves, values)
            outputs = part.run(*[values[name] for name in part.reads])
            values.update(zip(part.writes, outputs, strict=True))
            for name in part.drops:
                del values[name]
            if self.waits:
                jax.block_until_ready(outputs)
            finish_moves(leaving)
        fetched = [values[name] for name in self.fetched]
        if self._out is not None:
            fetched = self._out(*fetched)
        return [values[name] for name in self.written], fetched

    def at(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Stage, ...]:
        """Returns the executables for data of these shapes, which must fit the variables."""
        key = tuple(shapes)
        if key not in self._plans:
            fed = [self.program.variables[name] for name in self.data]
            own = [self.layout.own_shape(v, shape) for v, shape in zip(fed, shapes, strict=True)]
            self._plans[key] = self._parts.at(bind_sizes(zip(fed, own, strict=True)))
        return self._plans[key]

    def peak(self, shapes: Sequence[tuple[int, ...]]) -> Peak:
        """Returns the peak with data of these shapes, on one device; compiles all parts."""
        return peak_of(self.at(shapes), self.fetched)


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
