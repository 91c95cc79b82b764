"""Variables whose values are dead, in the order in which others take their memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxfleet.ir import Dim, Size, Variable

Log = Callable[[str], None]


@dataclass
class Pool:
    """Dead variables of a block: those of a batch first, then the smallest, then the oldest.

    Attributes:
        say: takes what is to be logged.
        closed: names in it that are written again themselves, so nothing else takes them.
    """

    say: Log
    closed: set[str] = field(default_factory=set)
    _held: list[Variable] = field(default_factory=list)

    def add(self, variable: Variable, *, closed: bool = False) -> None:
        """Puts a variable in."""
        places = (at for at, held in enumerate(self._held) if _order(held) > _order(variable))
        self._held.insert(next(places, len(self._held)), variable)
        if closed:
            self.closed.add(variable.name)

    def discard(self, name: str) -> None:
        """Takes a variable out, if it is there."""
        self._held = [held for held in self._held if held.name != name]
        self.closed.discard(name)

    def take(self, wanted: Variable, level: int, number: int) -> Variable | None:
        """Takes out the first variable that another's value may be written to.

        Args:
            wanted: the other.
            level: 0 for one of the same shape, 1 for one that is large enough.
            number: of what is taken, for the log.
        """
        for at, held in enumerate(self._held):
            if held.name == wanted.name:
                self.say(f"x :  {wanted.name}  cache :  {held.name}  is same var!")
                return None
            if held.name in self.closed:
                continue
            if held.dtype != wanted.dtype:
                self.say("x_dtype and cache_dtype are different")
            elif fits(wanted.shape, held.shape, level):
                x, cache = (f"{v.name}{_shown(v.shape)}" for v in (wanted, held))
                where = f"cache idx {at}, pool size {len(self._held)}"
                self.say(f"!!! {number},  {x} => {cache}, {where}")
                return self._held.pop(at)
        return None


def fits(wanted: tuple[Size, ...], held: tuple[Size, ...], level: int) -> bool:
    """Tells whether a value of a shape may be written where one of another shape was."""
    if level == 0 or wanted == held:
        return wanted == held
    return _unknown(wanted) == _unknown(held) and _numel(wanted) <= _numel(held)


def _unknown(shape: tuple[Size, ...]) -> tuple[bool, list[str]]:
    """Returns whether the first size is known only at run time, and all sizes that are."""
    unknown = sorted(str(size) for size in shape if isinstance(size, Dim))
    return isinstance(shape[0], Dim), unknown


def _numel(shape: tuple[Size, ...]) -> int:
    return math.prod(size for size in shape if isinstance(size, int))


def _order(variable: Variable) -> tuple[bool, int]:
    return not isinstance(variable.shape[0], Dim), _numel(variable.shape)


def _shown(shape: tuple[Size, ...]) -> list[int]:
    """Returns a shape as fluid writes it: -1 for what is known only at run time."""
    return [size if isinstance(size, int) else -1 for size in shape]
