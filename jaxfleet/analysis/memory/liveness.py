"""Live ranges of the values of a step: where each is made, and where it is last used.

A value is an output of an operator of block 0 or an input of the step; a name that is written again
is another value. Uses in sub-blocks count at their operator.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxfleet.analysis.effects import OuterUses
from jaxfleet.analysis.memory.costs import TemporaryBytes
from jaxfleet.ir import Block, Program

GIVEN = -1  # place that makes the inputs of a step
_FREES = frozenset({"delete_var"})  # these end a value without using it


@dataclass(frozen=True)
class LiveRange:
    """One value of block 0.

    Attributes:
        name: the variable that holds it.
        bytes: its counted size.
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


class InnerPeaks:
    """The peak bytes of an operator's sub-blocks on their own while it runs."""

    def __init__(self, program: Program, counted: TemporaryBytes) -> None:
        self._counted = counted
        self._uses = OuterUses(program)
        self._of_block: dict[int, int] = {}
        for block in reversed(program.blocks[1:]):  # a sub-block comes after the one that uses it
            self._of_block[block.index] = self._peak(block)

    def of(self, blocks: Iterable[int]) -> int:
        """Returns the peak of sub-blocks of which one runs at a time."""
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
