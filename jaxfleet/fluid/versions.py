"""What is made of a program, kept as long as the program lives and stays what it is."""

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from jaxfleet.fluid.program import Program

T = TypeVar("T")


class PerVersion(Generic[T]):
    """Keeps one thing for each program, and makes it anew when the program has changed.

    Args:
        make: makes it; what it makes holds nothing of the program, which it would keep alive.
    """

    def __init__(self, make: Callable[[Program], T]) -> None:
        self._make = make
        self._known: WeakKeyDictionary[Program, tuple[int, T]] = WeakKeyDictionary()

    def get(self, program: Program) -> T:
        """Returns what is kept for a program."""
        known = self._known.get(program)
        if known is None or known[0] != program.version:
            known = self._known[program] = (program.version, self._make(program))
        return known[1]

    def clear(self) -> None:
        """Lets everything go."""
        self._known.clear()
