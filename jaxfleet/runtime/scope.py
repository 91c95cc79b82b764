"""Scope: where variables that outlive a run keep their values."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import jax

from jaxfleet.ops import Array
from jaxfleet.tables import TableStore


@dataclass(frozen=True)
class OfRanks:
    """What several ranks have of a variable.

    Attributes:
        shown: rank 0's, which the scope holds under the variable's name.
        whole: all ranks', one after another along axis 0, each on its rank's device.
    """

    shown: Array
    whole: Array


class Scope(MutableMapping[str, Array]):
    """Maps names to arrays; what it does not hold, it looks for in its parent.

    Args:
        parent: the scope around this one; writes never go there.
    """

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.parent = parent
        self._values: dict[str, Array] = {}
        self._lent: set[str] = set()  # whose arrays someone beside this scope may hold
        self._of_ranks: dict[str, OfRanks] = {}
        self._rows: dict[str, TableStore] = {}

    @property
    def rows(self) -> dict[str, TableStore]:
        """The rows of tables that a server of this process has, by the table's name."""
        return self._rows

    def new_scope(self) -> "Scope":
        """Returns a scope inside this one."""
        return Scope(self)

    def keep(self, values: Mapping[str, Array]) -> None:
        """Takes arrays that nobody else holds, such as what a run has written."""
        self._values.update(values)
        self._lent.difference_update(values)
        self._forget_ranks(values)

    def keep_of_ranks(self, values: Mapping[str, OfRanks]) -> None:
        """Takes what several ranks have written, and shows what rank 0 has."""
        self.keep({name: found.shown for name, found in values.items()})
        self._of_ranks.update(values)

    def of_ranks(self, name: str) -> OfRanks | None:
        """Returns what ranks have of a variable; None where all have what the scope shows."""
        if name in self._values or self.parent is None:
            return self._of_ranks.get(name)
        return self.parent.of_ranks(name)

    def _forget_ranks(self, names: Iterable[str]) -> None:
        if self._of_ranks:
            for name in names:
                self._of_ranks.pop(name, None)

    def give(self, name: str) -> Array:
        """Returns an array whose memory a run may take: a copy where someone else may hold it.

        Raises:
            KeyError: there is none.
        """
        if self.is_lent(name):
            return jax.numpy.array(self.peek(name), copy=True)
        return self._values[name]

    def is_lent(self, name: str) -> bool:
        """Tells whether someone beside this scope may hold an array."""
        return name not in self._values or name in self._lent

    def peek(self, name: str) -> Array:
        """Returns an array that the caller does not hold on to.

        Raises:
            KeyError: there is none.
        """
        if name in self._values or self.parent is None:
            return self._values[name]
        return self.parent.peek(name)

    def __getitem__(self, name: str) -> Array:
        if name in self._values:
            self._lent.add(name)
            return self._values[name]
        if self.parent is None:
            raise KeyError(name)
        return self.parent[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self._values[name] = value
        self._lent.add(name)
        self._forget_ranks([name])

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self._forget_ranks([name])

    def __iter__(self) -> Iterator[str]:
        inherited = () if self.parent is None else tuple(self.parent)
        return iter(dict.fromkeys((*inherited, *self._values)))

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._values or (self.parent is not None and name in self.parent)

    def __repr__(self) -> str:
        return f"Scope({', '.join(self)})"
