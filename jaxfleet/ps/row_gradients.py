"""Gradients that have some rows of a slice: two arrays on their way, the rows and their numbers."""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxfleet.lower import HostType
from jaxfleet.ps.messages import Tensor

_NUMBERS = "@ROWS"  # ends the name of what holds the numbers of a gradient's rows


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


def whole_gradients(
    tensors: Iterable[Tensor], types: Mapping[str, HostType]
) -> tuple[tuple[Tensor, ...], str | None]:
    """Returns what was pushed with gradients of rows made whole, or why it cannot be.

    Rows that are not there are zeros, so that a server updates as one process does whose gradient
    is dense: also the rows that nobody looked up, if the optimizer moves them.

    Args:
        tensors: that were pushed.
        types: what each gradient is as a whole.
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
        whole = np.zeros(wanted.shape, wanted.dtype)
        whole[at.array] = tensor.array
        found.append(Tensor(name, whole))
    if numbers:
        return (), f"numbers of rows came without rows: {', '.join(numbers)}"
    return tuple(found), None


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
