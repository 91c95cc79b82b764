"""Live ranges of the values of a step, also as the compiler's fusion leaves them.

A value is an output of an operator of block 0 or an input of the step; a name that is written again
is another value. Uses in sub-blocks count at their operator.

XLA computes an element-wise operator inside its readers if these are element-wise too: once for
each reader if it is cheap, otherwise only for a single reader. The value of such an operator takes
no bytes, and its operands stay alive until its readers have run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.analysis.memory.costs import TemporaryBytes
from jaxfleet.ir import Block, Operator, Program

GIVEN = -1  # place that makes the inputs of a step
_FREES = frozenset({"delete_var"})  # these end a value without using it


@dataclass(frozen=True)
class LiveRange:
    """One value of block 0."""

    name: str  # the variable that holds it
    bytes: int  # its counted size
    made: int  # the place of the operator that writes it, or `GIVEN`
    reads: tuple[int, ...]  # the places of the operators that read it, in order
    # its last reader writes the variable again, so both share one buffer
    is_overwritten: bool = False

    @property
    def last(self) -> int:
        """The place of the last operator that uses it."""
        return max(self.made, self.reads[-1]) if self.reads else self.made


def live_ranges(program: Program, counted: TemporaryBytes | None = None) -> list[LiveRange]:
    """Returns the values of block 0, in the order they are made or first read.

    `counted` contains the size of each variable; 0 for variables left out.
    """
    uses, walk = OuterUses(program), _Walk([], {})
    for place, op in enumerate(program.root.ops):
        if op.type not in _FREES:
            # A sub-block that writes a name may not run, and then leaves it unchanged.
            inside = {name for index in op.blocks for name in uses.of_block(index).writes}
            used = uses.of(op)
            walk.read(place, _in_order(op.reads, used.reads | inside))
            walk.write(place, _in_order(op.writes, used.writes))
    return [
        LiveRange(
            name, counted.of(name) if counted and made != GIVEN else 0, made, tuple(reads), taken
        )
        for name, made, reads, taken in walk.values
    ]


@dataclass
class _Walk:
    """The values so far: name, place, readers, and whether each is overwritten."""

    values: list[tuple[str, int, list[int], bool]]
    held: dict[str, int]  # the number of each name's value

    def read(self, place: int, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.held:
                self._make(name, GIVEN)
            self.values[self.held[name]][2].append(place)

    def write(self, place: int, names: Iterable[str]) -> None:
        for name in names:
            if name in self.held:
                number = self.held[name]
                _, made, reads, _ = self.values[number]
                self.values[number] = (name, made, reads, reads[-1:] == [place])
            self._make(name, place)

    def _make(self, name: str, place: int) -> None:
        self.held[name] = len(self.values)
        self.values.append((name, place, [], False))


def _in_order(first: Iterable[str], more: Iterable[str]) -> list[str]:
    named = dict.fromkeys(first)
    return [*named, *sorted(set(more) - named.keys())]


class InnerValue(NamedTuple):
    """A temporary of a sub-block over the operators of a turn."""

    block: int
    name: str
    bytes: int
    first: int  # the place in the turn that writes it
    behind: int  # the place after its last use


class Turn(NamedTuple):
    """One turn of sub-blocks: of several of which one runs, the one that takes the most."""

    ops: Sequence[tuple[int, int, int]]  # block, place, and the bytes alive inside as it runs
    values: Sequence[InnerValue]


class InnerPeaks:
    """The peak bytes of an operator's sub-blocks on their own while it runs."""

    def __init__(self, program: Program, counted: TemporaryBytes) -> None:
        self._program = program
        self._counted = counted
        self._uses = OuterUses(program)
        self._of_block: dict[int, int] = {}
        for block in reversed(program.blocks[1:]):  # a sub-block comes after the one that uses it
            self._of_block[block.index] = self._peak(block)

    def of(self, blocks: Iterable[int]) -> int:
        """Returns the peak of sub-blocks of which one runs at a time."""
        return max((self._of_block[index] for index in blocks), default=0)

    def turn(self, blocks: Iterable[int]) -> Turn:
        """Returns one turn of sub-blocks, and of those inside them; its peak is what `of` says."""
        index = max(blocks, key=lambda each: self._of_block[each])
        block = self._program.blocks[index]
        born, dies = _spans(block, self._uses)
        sizes = {name: self._counted.of(name, block) for name in born}
        change = [0] * (len(block.ops) + 2)  # of the bytes alive, before each operator
        for name, size in sizes.items():
            change[born[name]] += size
            change[dies[name] + 1] -= size
        ops: list[tuple[int, int, int]] = []
        values: list[InnerValue] = []
        starts: list[int] = []
        for place, (op, alive) in enumerate(zip(block.ops, accumulate(change), strict=False)):
            starts.append(len(ops))
            if not op.blocks:
                ops.append((index, place, alive))
                continue
            inside = self.turn(op.blocks)
            values += [
                value._replace(first=value.first + len(ops), behind=value.behind + len(ops))
                for value in inside.values
            ]
            ops += [(number, at, alive + more) for number, at, more in inside.ops]
        starts += [len(ops)] * 2
        values += [
            InnerValue(index, name, size, starts[born[name]], starts[dies[name] + 1])
            for name, size in sizes.items()
            if size
        ]
        return Turn(ops, values)

    def _peak(self, block: Block) -> int:
        born, dies = _spans(block, self._uses)
        ends: dict[int, list[str]] = {}
        for name, place in dies.items():
            ends.setdefault(place, []).append(name)
        alive = peak = 0
        for place, op in enumerate(block.ops):
            alive += sum(
                self._counted.of(name, block)
                for name in dict.fromkeys(op.writes)
                if born.get(name) == place
            )
            peak = max(peak, alive + self.of(op.blocks))
            alive -= sum(self._counted.of(name, block) for name in ends.get(place, ()))
        return peak


def _spans(block: Block, uses: OuterUses) -> tuple[dict[str, int], dict[str, int]]:
    """Returns where each declared variable of a block is first written and last used.

    Arguments are the operator's operands, or slices of them, and are counted with those.
    """
    born: dict[str, int] = {}
    dies: dict[str, int] = {}
    for place, op in enumerate(block.ops):
        used = uses.of(op)
        for name in op.writes:
            if name in block.variables and name not in block.args:
                born.setdefault(name, place)
        for name in (*used.reads, *used.writes):
            if name in born:
                dies[name] = place
    for result in block.results:
        if isinstance(result, str) and result in born:
            dies[result] = len(block.ops)
    return born, dies


# Worth computing once for each reader.
_CHEAP = frozenset(
    {
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "copy", "eq"),
        *("convert_element_type", "expand_dims", "floor", "ge", "gt", "integer_pow", "iota"),
        *("is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad"),
        *("complex", "conj", "imag", "one_minus_square", "real", "shift_right_arithmetic"),
        *("reduce_precision", "reshape", "rev", "round", "select_n", "shift_left"),
        *("shift_right_logical", "sign", "slice", "square", "squeeze", "sub", "transpose", "xor"),
    }
)
_COSTLY = frozenset(
    {
        *("acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "div", "erf", "erf_inv", "exp"),
        *("digamma", "erfc", "lgamma"),
        *("exp2", "expm1", "log", "log1p", "logistic", "nextafter", "pow", "rem", "rsqrt", "sin"),
        *("sinh", "sqrt", "tan", "tanh"),
    }
)
_MOST_ARRAYS = 1  # operands of a value that is recomputed for each of its readers
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
_FLUID_CHEAP = frozenset(
    {
        *("abs", "cast", "elementwise_add", "elementwise_max", "elementwise_min"),
        *("elementwise_mul", "elementwise_sub", "fill_constant", "leaky_relu", "relu", "reshape2"),
        *("scale", "sign", "square", "sum"),
    }
)


def fused_ranges(program: Program, values: Sequence[LiveRange]) -> list[LiveRange]:
    """Returns the values of block 0 after fusion: some without bytes, others with longer lives."""
    ops, found = program.root.ops, list(values)
    reads: dict[int, set[int]] = {}  # by merged operator, the operators that it runs in
    by_maker: dict[int, list[int]] = {}
    for number, value in enumerate(values):
        if value.made != GIVEN:
            by_maker.setdefault(value.made, []).append(number)
    readers = {place: _readers(values, numbers) for place, numbers in by_maker.items()}
    for place in sorted(_merged(ops, values, readers), reverse=True):
        reads[place] = {x for at in readers[place] for x in reads.get(at, {at})}
    for number, value in enumerate(values):
        where = {x for at in value.reads for x in reads.get(at, {at})}
        size = 0 if value.made in reads else value.bytes
        found[number] = replace(value, bytes=size, reads=tuple(sorted(where)))
    return found


def executables(ops: Sequence[Operator]) -> list[int]:
    """Returns the number of each operator's executable: a `cut` ends one."""
    return list(accumulate((op.type == "cut" for op in ops), initial=0))[1:]


def _merged(
    ops: Sequence[Operator], values: Sequence[LiveRange], readers: Mapping[int, Sequence[int]]
) -> set[int]:
    """Returns the operators that are merged with their readers.

    A value with several readers is not merged once it is made of many arrays: a sum over all layers
    is written to memory, not recomputed from every layer's part.
    """
    inputs: dict[int, list[LiveRange]] = {}
    for value in values:
        for at in value.reads:
            inputs.setdefault(at, []).append(value)
    found, made_of = set[int](), dict[int, set[int]]()
    runs_in = executables(ops)
    for place in sorted(readers):
        is_inside = all(runs_in[at] == runs_in[place] for at in readers[place])
        made = set[int]()
        for value in inputs.get(place, ()):
            made |= made_of.get(value.made, {id(value)} if value.bytes else set())
        is_simple = len(made) <= _MOST_ARRAYS or len(readers[place]) <= 1
        if is_inside and is_simple and _is_merged(ops, place, readers[place]):
            found.add(place)
            made_of[place] = made
    return found


def _readers(values: Sequence[LiveRange], numbers: Sequence[int]) -> list[int]:
    return sorted({place for number in numbers for place in values[number].reads})


def _is_merged(ops: Sequence[Operator], place: int, readers: Sequence[int]) -> bool:
    if not readers or not all(is_elementwise(ops[at].type) for at in readers):
        return False
    if _is_one_of(ops[place].type, _CHEAP, _FLUID_CHEAP):
        return True
    return len(readers) == 1 and is_elementwise(ops[place].type) and not _reduces(ops[place].type)


def is_elementwise(op_type: str) -> bool:
    """Whether an operator's results are element-wise, or sums of element-wise results."""
    return _is_one_of(op_type, _CHEAP | _COSTLY, _FLUID_CHEAP) or _reduces(op_type)


def _reduces(op_type: str) -> bool:
    return _is_one_of(op_type, _REDUCTIONS, frozenset())


def _is_one_of(op_type: str, jax_types: frozenset[str], fluid_types: frozenset[str]) -> bool:
    if op_type.startswith("jax."):
        return op_type.removeprefix("jax.") in jax_types
    return op_type.removesuffix("_grad") in fluid_types
