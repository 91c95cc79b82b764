"""Scopes with their variables and tensors, selected rows, and scopes shared by programs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.fluid.framework.types import dtype_name
from jaxfleet.ops import Array
from jaxfleet.runtime.scope import OfRanks
from jaxfleet.runtime.scope import Scope as ArrayScope


class SelectedRows:
    """Rows of an array of `height` rows, with their numbers, which may repeat; initially empty."""

    def __init__(self, rows: Sequence[int] = (), height: int = 0) -> None:
        self._rows = [int(row) for row in rows]
        self._height, self._tensor = int(height), _RowsTensor()

    def rows(self) -> list[int]:
        return list(self._rows)

    def set_rows(self, rows: Sequence[int]) -> None:
        self._rows = [int(row) for row in rows]

    def height(self) -> int:
        return self._height

    def set_height(self, height: int) -> None:
        self._height = int(height)

    def numel(self) -> int:
        """Returns the number of elements in the rows."""
        return int(np.asarray(self._tensor).size)

    def sync_index(self) -> None:
        """Does nothing: rows are found by their current numbers."""

    def to_array(self) -> np.ndarray:
        """Returns the whole array: rows of equal numbers summed, zeros elsewhere."""
        values = self.value()
        whole = np.zeros((self._height, *values.shape[1:]), values.dtype)
        np.add.at(whole, self._rows, values)
        return whole

    def get_tensor(self) -> "_RowsTensor":
        """Returns a tensor for reading the rows by `np.array`, or setting them."""
        return self._tensor

    def value(self) -> np.ndarray:
        """Returns the rows; ProgramError if their number differs from that of the row numbers."""
        found = np.asarray(self._tensor)
        if len(found) != len(self._rows):
            what = f"{len(found)} rows have {len(self._rows)} numbers"
            raise ProgramError(what, hint="call set_rows and get_tensor().set with as many")
        return found


class _RowsTensor:
    def __init__(self) -> None:
        self._array = np.empty((0, 0), np.float32)

    def set(self, array: Any, place: object = None) -> None:
        del place
        self._array = np.array(array)

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.array(self._array, dtype=dtype)


class Scope(ArrayScope):
    """Holds values by name; a run writes a variable where it is found, here or further out.

    `kids` are the nested scopes, `selected_rows` the values that are selected rows.
    """

    def __init__(self, parent: ArrayScope | None = None) -> None:
        super().__init__(parent)
        self.kids: list[Scope] = []
        self.selected_rows: dict[str, SelectedRows] = {}
        self._declared: set[str] = set()

    @classmethod
    def around(cls, scope: ArrayScope) -> "Scope":
        """Returns a scope that shares the contents of another one."""
        if isinstance(scope, cls):
            return scope
        made = cls(scope.parent)
        made._values, made._lent = scope._values, scope._lent
        made._of_ranks, made._rows = scope._of_ranks, scope._rows
        return made

    def var(self, name: str) -> "ScopeVariable":
        """Returns a variable of this scope, creating it if necessary."""
        self._declared.add(name)
        return ScopeVariable(self, name)

    def find_var(self, name: str) -> "ScopeVariable | None":
        """Returns a variable of this scope or an enclosing one, or None."""
        home = self._home(name)
        return None if home is None else ScopeVariable(home, name)

    def new_scope(self) -> "Scope":
        self.kids.append(Scope(self))
        return self.kids[-1]

    def drop_kids(self) -> None:
        self.kids.clear()

    def local_var_names(self) -> list[str]:
        """Returns the names in this scope, without enclosing ones."""
        return list(dict.fromkeys((*self._values, *sorted(self._declared))))

    def keep(self, values: Mapping[str, Array]) -> None:
        """Stores the results of a run: in the scope of the variable, or here if it is new."""
        if self.parent is None:
            super().keep(values)
            return
        for name, value in values.items():
            home = self._home(name)
            ArrayScope.keep(self if home is None else home, {name: value})

    def keep_of_ranks(self, values: Mapping[str, OfRanks]) -> None:
        """Stores the results of several ranks, like `keep`."""
        for name, found in values.items():
            home = self._home(name)
            ArrayScope.keep_of_ranks(self if home is None else home, {name: found})

    def _home(self, name: str) -> ArrayScope | None:
        """Returns the nearest scope that declares a variable, with or without a value."""
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
        return self._name

    def get_tensor(self) -> "ScopeTensor":
        """Returns a view of its current value."""
        return ScopeTensor(self._scope, self._name)

    def get_selected_rows(self) -> SelectedRows:
        """Returns its selected rows, initially empty.

        Raises ProgramError if its scope is not one of fluid's.
        """
        if not isinstance(self._scope, Scope):
            raise ProgramError(f"the scope of '{self._name}' holds arrays alone, and no rows")
        return self._scope.selected_rows.setdefault(self._name, SelectedRows())


class ScopeTensor:
    """The value of a variable in a scope: `np.array(tensor)` reads it, `set` replaces it."""

    def __init__(self, scope: ArrayScope, name: str) -> None:
        self._scope, self._name = scope, name

    def set(self, array: Any, place: object = None) -> None:
        """Sets the variable in its own scope; a run moves the value to its device."""
        del place
        ArrayScope.keep(self._scope, {self._name: jnp.array(array, copy=True)})

    def shape(self) -> list[int]:
        """Returns the sizes of its axes; an empty list if it has no value."""
        return list(self._scope.peek(self._name).shape) if self._is_initialized() else []

    def lod(self) -> list[list[int]]:
        """Returns the offsets of sequences, which an array does not have."""
        return []

    def _dtype(self) -> str:
        return dtype_name(self._value().dtype)

    def _is_initialized(self) -> bool:
        return self._name in self._scope

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # the next run may reuse the memory, so it is always copied
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
    """Returns the default scope of runs."""
    return _CURRENT.scope


@contextmanager
def scope_guard(scope: ArrayScope) -> Iterator[None]:
    """Replaces the global scope within a `with` block; TypeError if the argument is not a scope."""
    if not isinstance(scope, ArrayScope):
        raise WrongTypeError(f"scope_guard takes a Scope, not a {type(scope).__name__}")
    old, _CURRENT.scope = _CURRENT.scope, Scope.around(scope)
    try:
        yield
    finally:
        _CURRENT.scope = old


class SharedScope(Scope):
    """Two scopes as one: variables are found in the shared scope, then in the program's own.

    Writes go to the scope of the variable, and new variables to the own scope.
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
