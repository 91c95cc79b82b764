"""SharedScope: what a program finds whose variables are those of another that has run."""

from collections.abc import Iterator, Mapping

from jaxfleet.fluid.scope import Scope
from jaxfleet.ops import Array
from jaxfleet.runtime.scope import OfRanks
from jaxfleet.runtime.scope import Scope as ArrayScope


class SharedScope(Scope):
    """Two scopes as one: a variable is that of the first where it has it, else of the second.

    Writes go where a variable was found, and new ones to the second scope.

    Args:
        shared: of the program whose variables are shared.
        own: of the program that shares them.
    """

    def __init__(self, shared: ArrayScope, own: ArrayScope) -> None:
        super().__init__(own)
        self._shared, self._own = shared, own

    def _of(self, name: str) -> ArrayScope:
        return self._shared if name in self._shared else self._own

    def peek(self, name: str) -> Array:
        return self._of(name).peek(name)

    def give(self, name: str) -> Array:
        return self._of(name).give(name)

    def is_lent(self, name: str) -> bool:
        return self._of(name).is_lent(name)

    def of_ranks(self, name: str) -> OfRanks | None:
        return self._of(name).of_ranks(name)

    def keep(self, values: Mapping[str, Array]) -> None:
        for name, value in values.items():
            self._of(name).keep({name: value})

    def keep_of_ranks(self, values: Mapping[str, OfRanks]) -> None:
        for name, found in values.items():
            self._of(name).keep_of_ranks({name: found})

    def __getitem__(self, name: str) -> Array:
        return self._of(name)[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self._of(name)[name] = value

    def __delitem__(self, name: str) -> None:
        del self._of(name)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._shared, *self._own)))

    def __contains__(self, name: object) -> bool:
        return name in self._shared or name in self._own
