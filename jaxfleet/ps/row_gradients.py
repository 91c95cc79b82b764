"""Gradients that have some rows of a slice: two arrays on their way, the rows and their numbers."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxfleet.lower import HostType
from jaxfleet.ps.messages import Tensor

_NUMBERS = "@ROWS"  # ends the name of what holds the numbers of a gradient's rows


@dataclass(frozen=True, eq=False)
class RowGradient:
    """A gradient of a slice that is zero but for some rows.

    Attributes:
        numbers: i32[n], each once.
        rows: [n, ...].
        height: how many rows the slice has.
    """

    numbers: np.ndarray
    rows: np.ndarray
    height: int

    @classmethod
    def none(cls, whole: HostType) -> "RowGradient":
        """Returns that of zeros alone."""
        return cls(
            np.empty(0, np.int32), np.empty((0, *whole.shape[1:]), whole.dtype), whole.shape[0]
        )

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.numbers.nbytes + self.rows.nbytes

    def whole(self) -> np.ndarray:
        """Returns the gradient with its zeros."""
        found = np.zeros((self.height, *self.rows.shape[1:]), self.rows.dtype)
        found[self.numbers] = self.rows
        return found


@dataclass(frozen=True)
class RowTensor(Tensor):
    """Rows of a gradient as a push brought them, once they are known to fit.

    Attributes:
        numbers: of the rows.
        height: how many rows the slice has.
    """

    numbers: np.ndarray
    height: int


def taken(tensor: Tensor) -> np.ndarray | RowGradient:
    """Returns what a push brought."""
    if isinstance(tensor, RowTensor):
        return RowGradient(tensor.numbers, tensor.array, tensor.height)
    return tensor.array


def row_gradient(name: str, numbers: np.ndarray, rows: np.ndarray) -> list[Tensor]:
    """Returns a gradient as it travels.

    Args:
        name: the gradient's.
        numbers: i32[n], each once.
        rows: f32[n, ...].
    """
    return [Tensor(name + _NUMBERS, numbers), Tensor(name, rows)]


def has_rows(tensors: Iterable[Tensor]) -> bool:
    """Tells whether some gradients come as rows."""
    return any(tensor.name.endswith(_NUMBERS) for tensor in tensors)


def fitting_gradients(
    tensors: Iterable[Tensor], types: Mapping[str, HostType], by_rows: Collection[str]
) -> tuple[tuple[Tensor, ...], str | None]:
    """Returns what was pushed with gradients of rows as blocks take them, or why it cannot be.

    They stay rows where the block updates no others. Else they are made whole, and rows that are
    not there are zeros, so that a server updates as one process does whose gradient is dense: also
    the rows that nobody looked up, if the optimizer moves them.

    Args:
        tensors: that were pushed.
        types: what each gradient is as a whole.
        by_rows: the gradients that stay rows.
    """
    given = {tensor.name: tensor for tensor in tensors}
    numbers = {name: given.pop(name) for name in list(given) if name.endswith(_NUMBERS)}
    found = []
    for name, tensor in given.items():
        at = numbers.pop(name + _NUMBERS, None)
        if at is None:
            found.append(tensor)
            continue
        wanted = types.get(name)
        misfit = _misfit(at.array, tensor.array, wanted)
        if wanted is None or misfit is not None:
            return (), f"'{name}': {misfit}"
        rows = RowTensor(name, tensor.array, at.array, wanted.shape[0])
        found.append(rows if name in by_rows else Tensor(name, _whole(rows)))
    if numbers:
        return (), f"numbers of rows came without rows: {', '.join(numbers)}"
    return tuple(found), None


def _whole(rows: RowTensor) -> np.ndarray:
    return RowGradient(rows.numbers, rows.array, rows.height).whole()


def rows_misfit(numbers: np.ndarray, held: HostType) -> str | None:
    """Returns why rows of a slice cannot be given that are asked for by number."""
    if numbers.ndim != 1 or numbers.dtype.kind != "i":
        return f"rows are asked for by {numbers.dtype}{list(numbers.shape)}"
    if not _are_there(numbers, held.shape[0]):
        return f"rows from {numbers.min()} to {numbers.max()} are asked for, of {held.shape[0]}"
    return None


def _misfit(numbers: np.ndarray, rows: np.ndarray, wanted: HostType | None) -> str | None:
    if wanted is None:
        return "there is no such gradient here"
    if numbers.ndim != 1 or numbers.dtype.kind != "i" or rows.shape[:1] != numbers.shape:
        return f"{list(rows.shape)} rows have {list(numbers.shape)} numbers"
    if rows.dtype != wanted.dtype or rows.shape[1:] != wanted.shape[1:]:
        return f"rows are {rows.dtype}{list(rows.shape)}, of {wanted.dtype}{list(wanted.shape)}"
    if not _are_there(numbers, wanted.shape[0]):
        return f"rows from {numbers.min()} to {numbers.max()}, of {wanted.shape[0]}"
    return None


def _are_there(numbers: np.ndarray, count: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < count)
