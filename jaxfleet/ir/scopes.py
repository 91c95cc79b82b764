"""Visibility of variables in blocks, in constant time per query.

`Program.lookup` walks up the blocks, and the optimize blocks of a parameter server form a chain
with one block per parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxfleet.ir.program import Program
from jaxfleet.ir.variable import Kind, Variable

_PROGRAM = -1  # represents the program's own variables among block indices


class Scopes:
    """The declarations in a program whose blocks are numbered correctly.

    Attributes:
        constants: the names of constants, wherever they are declared.
    """

    def __init__(self, program: Program) -> None:
        self._first, self._last = _spans(program)
        self._repeated: dict[str, list[int]] = {}  # names declared several times, with blocks
        self.constants: set[str] = set()
        once: dict[str, int] = {}
        for index, scope in _scopes(program):
            for name, variable in scope.items():
                if variable.kind is Kind.CONST:
                    self.constants.add(name)
                if name in once:
                    self._repeated.setdefault(name, [once[name]]).append(index)
                else:
                    once[name] = index
        self._once = once

    def is_inside(self, inner: int, outer: int) -> bool:
        """Whether a block is another, or lies in it."""
        return self._first[outer] <= self._first[inner] <= self._last[outer]

    def unseen_from(self, index: int) -> Callable[[Sequence[str]], list[str]]:
        """Returns the function that selects the names that a block cannot see."""
        at_once = {_PROGRAM, index}
        declared = self._once.get

        def unseen(names: Sequence[str]) -> list[str]:
            return [
                name for name in names if declared(name) not in at_once and self._hides(name, index)
            ]

        return unseen

    def hiding(self) -> Iterator[tuple[str, int, int]]:
        """Yields (name, inner block, outer block or -1 for the program) of hidden variables."""
        for name, places in self._repeated.items():
            around: list[int] = []
            for place in sorted(places, key=lambda place: self._first[place]):
                while around and not self.is_inside(place, around[-1]):
                    around.pop()
                if around:
                    yield name, place, around[-1]
                around.append(place)

    def _hides(self, name: str, index: int) -> bool:
        if name not in self._once:
            return True
        places = self._repeated.get(name, [self._once[name]])
        return not any(self.is_inside(index, place) for place in places)


def _scopes(program: Program) -> Iterator[tuple[int, Mapping[str, Variable]]]:
    yield _PROGRAM, program.variables
    for block in program.blocks:
        yield block.index, block.variables


def _spans(program: Program) -> tuple[dict[int, int], dict[int, int]]:
    """Numbers the blocks so that a block is directly followed by all blocks inside it.

    Returns:
        The number of each block, and of the last block inside it.
    """
    size = [1] * len(program.blocks)  # of the block and all blocks inside it
    for block in reversed(program.blocks[1:]):
        size[block.parent] += size[block.index]
    first, last = {_PROGRAM: -1}, {_PROGRAM: len(program.blocks)}
    free = {_PROGRAM: 0}  # the next free number within a block
    for block in program.blocks:
        number = free[block.parent]
        free[block.parent] += size[block.index]
        first[block.index], last[block.index] = number, number + size[block.index] - 1
        free[block.index] = number + 1
    return first, last
