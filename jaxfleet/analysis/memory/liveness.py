"""When each value of a step is made, and when it is last used.

A value is what an operator of block 0 writes, or what a step is given; a name that is written
again is another value. What sub-blocks use counts where their operator stands.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxfleet.analysis.memory.sizes import Counted
from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Block, Program

GIVEN = -1  # where what a step is given is made
_FREES = frozenset({"delete_var"})  # these end a value, and do not use it


@dataclass(frozen=True)
class Value:
    """One value of block 0.

    Attributes:
        name: the variable that holds it.
        bytes: what it counts for.
        made: the place of the operator that writes it, or `GIVEN`.
        reads: the places of the operators that read it, in order.
        is_overwritten: its last reader writes the variable again, so both share one buffer.
    """

    name: str
    bytes: int
    made: int
    reads: tuple[int, ...]
    is_overwritten: bool = False

    @property
    def last(self) -> int:
        """The place of the operator behind which it is dead."""
        return max(self.made, self.reads[-1]) if self.reads else self.made


def values_of(program: Program, counted: Counted | None = None) -> list[Value]:
    """Returns the values of block 0, in the order they are made or first read.

    Args:
        program: any.
        counted: says what each variable counts for; nothing, where it is left out.
    """
    uses, walk = OuterUses(program), _Walk([], {})
    for place, op in enumerate(program.root.ops):
        if op.type not in _FREES:
            # A sub-block that writes a name may not run, and then leaves it as it was.
            inside = {name for index in op.blocks for name in uses.of_block(index).writes}
            used = uses.of(op)
            walk.read(place, _in_order(op.reads, used.reads | inside))
            walk.write(place, _in_order(op.writes, used.writes))
    return [
        Value(name, counted.of(name) if counted and made != GIVEN else 0, made, tuple(reads), taken)
        for name, made, reads, taken in walk.values
    ]


@dataclass
class _Walk:
    """What is known of the values so far: name, place, readers, and whether it is overwritten."""

    values: list[tuple[str, int, list[int], bool]]
    held: dict[str, int]  # the value that each name holds, by its number

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


class InnerPeaks:
    """The most bytes that the sub-blocks of an operator hold of their own while it runs."""

    def __init__(self, program: Program, counted: Counted) -> None:
        self._counted = counted
        self._uses = OuterUses(program)
        self._of_block: dict[int, int] = {}
        for block in reversed(program.blocks[1:]):  # a sub-block comes after the one that uses it
            self._of_block[block.index] = self._peak(block)

    def of(self, blocks: Iterable[int]) -> int:
        """Returns the peak of sub-blocks, one of which runs at a time."""
        return max((self._of_block[index] for index in blocks), default=0)

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
    """Returns where what a block declares is first written, and where it is last used.

    Its arguments are the operator's operands, or slices of them, and are counted with those.
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
