"""The variables that hold the values of a step at its end, if several values share a name.

The pass `memory_optimize` lets an operator write a dead variable instead of another, and records it
in the operator's attribute `instead_of`: `{instead_of=[["a", "d"]]}` writes to `a` the value that
was called `d`. So the record stays valid for the remaining operators when a program is copied or
reduced.
"""

from collections.abc import Iterable, Iterator

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.errors import FeedError
from jaxfleet.ir import Operator, Program
from jaxfleet.ir.naming import INSTEAD_OF

_HINT = "name it in skip_opt_set where memory_optimize is called"
_RELEASED = "name it in skip_opt_set where release_memory is called"


def instead_of(op: Operator) -> dict[str, str]:
    """Returns the names of the original variables, by the variable written instead."""
    pairs = op.attrs.get(INSTEAD_OF, ())
    assert isinstance(pairs, tuple)
    return {str(pair[0]): str(pair[1]) for pair in pairs if isinstance(pair, tuple)}


def has_shared_names(program: Program) -> bool:
    """Whether some variable of block 0 holds another's value."""
    return any(INSTEAD_OF in op.attrs for op in program.root.ops)


def final_variables(program: Program, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the variables that hold values when block 0 ends, by their names before reuse.

    A value that was overwritten or released is a FeedError.
    """
    names = tuple(names)
    if not any(INSTEAD_OF in op.attrs or op.type == "delete_var" for op in program.root.ops):
        return names
    held = _Held(program)
    return tuple(held.where(name) for name in names)


def check_fed(program: Program, names: Iterable[str]) -> None:
    """Raises a FeedError if a fed value shares its name: it would be read for both or neither."""
    if not has_shared_names(program):
        return
    shared = {
        name for pairs in map(instead_of, program.root.ops) for x in pairs.items() for name in x
    }
    for name in names:
        if name in shared:
            what = f"'{name}' is fed, and memory_optimize gave its memory to another value"
            raise FeedError(what, hint=_HINT)


class _Held:
    """The value that each variable of block 0 holds at its end."""

    def __init__(self, program: Program) -> None:
        self.lies: dict[str, str] = {}  # by written value, the variable that holds it
        self.taken: dict[str, tuple[str, str]] = {}  # by overwritten value, variable and new value
        self.released: set[str] = set()  # the values that are released before the end
        self._holds: dict[str, str] = {}
        waiting: set[str] = set()  # by `delete_var`, until the end of an executable
        for op, written in _writes(program):
            if op.type == "delete_var":
                waiting.update(op.reads)
            elif op.type == "cut":
                self.released |= {self._holds.get(name, name) for name in waiting}
                waiting.clear()
            stands_for = instead_of(op)
            for name in written:
                waiting.discard(name)
                self._write(name, stands_for.get(name, name))

    def _write(self, name: str, value: str) -> None:
        old = self._holds.get(name)
        if old is not None and old != value and self.lies.get(old) == name:
            del self.lies[old]
            self.taken[old] = (name, value)
        self._holds[name], self.lies[value] = value, name
        self.released.discard(value)
        self.taken.pop(value, None)

    def where(self, value: str) -> str:
        """Returns the variable that holds a value; raises a FeedError if there is none any more."""
        if value in self.taken:
            name, now = self.taken[value]
            what = f"'{value}' is fetched, and memory_optimize gave its memory to '{now}'"
            raise FeedError(f"{what} ('{name}')" if name not in (value, now) else what, hint=_HINT)
        if value in self.released:
            what = f"'{value}' is fetched, and release_memory let it go"
            raise FeedError(what, hint=_RELEASED)
        return self.lies.get(value, value)


def _writes(program: Program) -> Iterator[tuple[Operator, list[str]]]:
    """Yields the operators of block 0, with the writes of each and of its sub-blocks."""
    uses = OuterUses(program)
    for op in program.root.ops:
        yield op, [*op.writes, *sorted(uses.of(op).writes - {*op.writes})]
