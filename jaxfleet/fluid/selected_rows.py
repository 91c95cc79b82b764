"""Some rows of a larger array, with their numbers, as a script sets and reads them in a scope."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError


class SelectedRows:
    """Rows and their numbers, of which one may stand several times; at first none.

    Args:
        rows: the numbers.
        height: how many rows the whole array has.
    """

    def __init__(self, rows: Sequence[int] = (), height: int = 0) -> None:
        self._rows = [int(row) for row in rows]
        self._height, self._tensor = int(height), _Tensor()

    def rows(self) -> list[int]:
        """Returns the numbers."""
        return list(self._rows)

    def set_rows(self, rows: Sequence[int]) -> None:
        """Takes other numbers."""
        self._rows = [int(row) for row in rows]

    def height(self) -> int:
        """Returns how many rows the whole array has."""
        return self._height

    def set_height(self, height: int) -> None:
        """Says how many rows the whole array has."""
        self._height = int(height)

    def numel(self) -> int:
        """Returns how many elements the rows have."""
        return int(np.asarray(self._tensor).size)

    def sync_index(self) -> None:
        """Does nothing: rows are found by their numbers as they stand."""

    def to_array(self) -> np.ndarray:
        """Returns the whole array: rows of one number added up, zeros where there is none."""
        values = self.value()
        whole = np.zeros((self._height, *values.shape[1:]), values.dtype)
        np.add.at(whole, self._rows, values)
        return whole

    def get_tensor(self) -> "_Tensor":
        """Returns the rows, to be read by `np.array` or set."""
        return self._tensor

    def value(self) -> np.ndarray:
        """Returns the rows, once there is one for each number.

        Raises:
            ProgramError: there are more or fewer.
        """
        found = np.asarray(self._tensor)
        if len(found) != len(self._rows):
            what = f"{len(found)} rows have {len(self._rows)} numbers"
            raise ProgramError(what, hint="call set_rows and get_tensor().set with as many")
        return found


class _Tensor:
    def __init__(self) -> None:
        self._array = np.empty((0, 0), np.float32)

    def set(self, array: Any, place: object = None) -> None:
        """Takes rows."""
        del place
        self._array = np.array(array)

    def shape(self) -> list[int]:
        """Returns the sizes of its axes."""
        return list(self._array.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.array(self._array, dtype=dtype)
