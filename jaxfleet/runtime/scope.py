"""Scope: where variables that outlive a run keep their values."""

from collections.abc import Iterator, MutableMapping

from jaxfleet.ops import Array


class Scope(MutableMapping[str, Array]):
    """Maps names to arrays; what it does not hold, it looks for in its parent.

    Args:
        parent: the scope around this one; writes never go there.
    """

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.parent = parent
        self._values: dict[str, Array] = {}

    def new_scope(self) -> "Scope":
        """Returns a scope inside this one."""
        return Scope(self)

    def __getitem__(self, name: str) -> Array:
        if name in self._values:
            return self._values[name]
        if self.parent is None:
            raise KeyError(name)
        return self.parent[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        inherited = () if self.parent is None else tuple(self.parent)
        return iter(dict.fromkeys((*inherited, *self._values)))

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._values or (self.parent is not None and name in self.parent)

    def __repr__(self) -> str:
        return f"Scope({', '.join(self)})"
