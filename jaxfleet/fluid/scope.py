"""Scopes as scripts use them: variables found by name, whose values are read and set."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.fluid.dtypes import dtype_name
from jaxfleet.fluid.selected_rows import SelectedRows
from jaxfleet.ops import Array
from jaxfleet.runtime.scope import OfRanks
from jaxfleet.runtime.scope import Scope as ArrayScope


class Scope(ArrayScope):
    """Holds values by name; a run writes a variable where it is found, in this scope or around it.

    Attributes:
        kids: the scopes made inside this one.
        selected_rows: what variables hold that are some rows of something, by name.
    """

    def __init__(self, parent: ArrayScope | None = None) -> None:
        super().__init__(parent)
        self.kids: list[Scope] = []
        self.selected_rows: dict[str, SelectedRows] = {}
        self._declared: set[str] = set()

    @classmethod
    def around(cls, scope: ArrayScope) -> "Scope":
        """Returns a scope that holds what another one holds, and goes on sharing it."""
        if isinstance(scope, cls):
            return scope
        made = cls(scope.parent)
        made._values, made._lent = scope._values, scope._lent
        made._of_ranks, made._rows = scope._of_ranks, scope._rows
        return made

    def var(self, name: str) -> "ScopeVariable":
        """Returns a variable of this scope, made if it is not there."""
        self._declared.add(name)
        return ScopeVariable(self, name)

    def find_var(self, name: str) -> "ScopeVariable | None":
        """Returns a variable of this scope or one around it; None where there is none."""
        home = self._home(name)
        return None if home is None else ScopeVariable(home, name)

    def new_scope(self) -> "Scope":
        """Returns a scope inside this one."""
        self.kids.append(Scope(self))
        return self.kids[-1]

    def drop_kids(self) -> None:
        """Lets the scopes inside this one go."""
        self.kids.clear()

    def local_var_names(self) -> list[str]:
        """Returns the names in this scope itself."""
        return list(dict.fromkeys((*self._values, *sorted(self._declared))))

    def keep(self, values: Mapping[str, Array]) -> None:
        """Takes what a run has written: where it was found, or here if it is new."""
        if self.parent is None:
            super().keep(values)
            return
        for name, value in values.items():
            home = self._home(name)
            ArrayScope.keep(self if home is None else home, {name: value})

    def keep_of_ranks(self, values: Mapping[str, OfRanks]) -> None:
        """Takes what several ranks have written, where `keep` takes what one has."""
        for name, found in values.items():
            home = self._home(name)
            ArrayScope.keep_of_ranks(self if home is None else home, {name: found})

    def _home(self, name: str) -> ArrayScope | None:
        """Returns the nearest scope that has a variable, with or without a value."""
        scope: ArrayScope | None = self
        while scope is not None and not _has(scope, name):
            scope = scope.parent
        return scope


def _has(scope: ArrayScope, name: str) -> bool:
    return name in scope._values or (isinstance(scope, Scope) and name in scope._declared)


class ScopeVariable:
    """A variable of a scope."""

    def __init__(self, scope: ArrayScope, name: str) -> None:
        self._scope, self._name = scope, name

    def name(self) -> str:
        """Returns its name."""
        return self._name

    def get_tensor(self) -> "ScopeTensor":
        """Returns its value, as it is whenever that is read."""
        return ScopeTensor(self._scope, self._name)

    def get_selected_rows(self) -> SelectedRows:
        """Returns the rows that it holds; at first none.

        Raises:
            ProgramError: its scope is none of fluid's.
        """
        if not isinstance(self._scope, Scope):
            raise ProgramError(f"the scope of '{self._name}' holds arrays alone, and no rows")
        return self._scope.selected_rows.setdefault(self._name, SelectedRows())


class ScopeTensor:
    """What a variable of a scope holds: `np.array(tensor)` reads it, `set` replaces it."""

    def __init__(self, scope: ArrayScope, name: str) -> None:
        self._scope, self._name = scope, name

    def set(self, array: Any, place: object = None) -> None:
        """Gives the variable a value, in its own scope whatever those around it hold.

        Args:
            array: it.
            place: taken; a run moves the value where it is needed.
        """
        del place
        ArrayScope.keep(self._scope, {self._name: jnp.array(array, copy=True)})

    def shape(self) -> list[int]:
        """Returns the sizes of its axes; none while it has no value."""
        return list(self._scope.peek(self._name).shape) if self._is_initialized() else []

    def lod(self) -> list[list[int]]:
        """Returns where sequences begin and end: an array has none."""
        return []

    def _dtype(self) -> str:
        return dtype_name(self._value().dtype)

    def _is_initialized(self) -> bool:
        return self._name in self._scope

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # the next run may take the memory, so it is always one
        return np.array(self._value(), dtype=dtype)

    def __len__(self) -> int:
        return len(self._value())

    def _value(self) -> Array:
        if not self._is_initialized():
            what = f"'{self._name}' has no value yet"
            raise ProgramError(what, hint="run the startup program in this scope, or set it")
        return self._scope.peek(self._name)


class _Current:
    def __init__(self) -> None:
        self.scope = Scope()


_CURRENT = _Current()


def global_scope() -> Scope:
    """Returns the scope that programs run in unless told otherwise."""
    return _CURRENT.scope


@contextmanager
def scope_guard(scope: ArrayScope) -> Iterator[None]:
    """Takes another global scope within a `with`.

    Raises:
        TypeError: what is given is no scope.
    """
    if not isinstance(scope, ArrayScope):
        raise WrongTypeError(f"scope_guard takes a Scope, not a {type(scope).__name__}")
    old, _CURRENT.scope = _CURRENT.scope, Scope.around(scope)
    try:
        yield
    finally:
        _CURRENT.scope = old
