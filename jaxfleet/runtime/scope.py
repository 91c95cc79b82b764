"""Scope: values of variables that outlive a run."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import jax

from jaxfleet.ops import Array
from jaxfleet.tables import TableStore


@dataclass(frozen=True)
class OfRanks:
    """Values of a variable on several ranks."""

    shown: Array  # rank 0's, which the scope holds under the variable's name
    whole: Array  # all ranks', concatenated along axis 0, each on its rank's device


class Scope(MutableMapping[str, Array]):
    """Maps names to arrays; missing names are looked up in its parent.

    Args:
        parent: the enclosing scope, which is never written to.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> scope = jf.Scope()
        >>> scope["w"] = jnp.ones(2)
        >>> inner = scope.new_scope()
        >>> inner["h"] = jnp.zeros(3)
        >>> scope, inner
        (Scope(w), Scope(w, h))
    """

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.parent = parent
        self._values: dict[str, Array] = {}
        self._lent: set[str] = set()  # names of arrays that may be referenced elsewhere
        self._of_ranks: dict[str, OfRanks] = {}
        self._rows: dict[str, TableStore] = {}

    @property
    def rows(self) -> dict[str, TableStore]:
        """The rows of tables that a server of this process holds, by the table's name."""
        return self._rows

    def new_scope(self) -> "Scope":
        """Returns a child scope."""
        return Scope(self)

    def keep(self, values: Mapping[str, Array]) -> None:
        """Stores arrays without other references, such as the outputs of a run."""
        self._values.update(values)
        self._lent.difference_update(values)
        self._forget_ranks(values)

    def keep_of_ranks(self, values: Mapping[str, OfRanks]) -> None:
        """Stores the outputs of several ranks, and shows rank 0's."""
        self.keep({name: found.shown for name, found in values.items()})
        self._of_ranks.update(values)

    def of_ranks(self, name: str) -> OfRanks | None:
        """Returns the ranks' values of a variable; None if all have the scope's."""
        if name in self._values or self.parent is None:
            return self._of_ranks.get(name)
        return self.parent.of_ranks(name)

    def _forget_ranks(self, names: Iterable[str]) -> None:
        if self._of_ranks:
            for name in names:
                self._of_ranks.pop(name, None)

    def give(self, name: str) -> Array:
        """Returns an array whose memory a run may take: a copy if it may be referenced elsewhere.

        Raises:
            KeyError: there is no such variable.
        """
        if self.is_lent(name):
            return jax.numpy.array(self.peek(name), copy=True)
        return self._values[name]

    def is_lent(self, name: str) -> bool:
        """Whether an array may be referenced outside this scope."""
        return name not in self._values or name in self._lent

    def peek(self, name: str) -> Array:
        """Returns an array that the caller does not keep.

        Raises:
            KeyError: there is no such variable.
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
