"""Which gradients of a push count: those that are finite, or the push is refused."""

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.compiled import compiled
from jaxfleet.tables.spec import TableSpec


def finite(spec: TableSpec, keys: np.ndarray, grads: np.ndarray, step: int) -> np.ndarray | slice:
    """Returns the places of the gradients that are finite; a slice where all are.

    Args:
        spec: of the table, which says what one that is not does.
        keys: int64[n].
        grads: float32[n, dim], contiguous.
        step: that they are of, for an error.

    Raises:
        ProgramError: they are no gradients of those keys, or one is not finite and the table
            refuses those.
    """
    if grads.shape != (len(keys), spec.dim):
        what = f"table '{spec.name}': gradients {grads.shape} for {len(keys)} keys"
        raise ProgramError(what, hint=f"a row has {spec.dim} elements")
    places = np.empty(len(grads), np.int64)
    odd = places[: _not_finite(grads.view(np.int32), places)]
    if not len(odd):
        return slice(None)
    if spec.on_nan == "refuse":
        raise _refused(spec, keys, grads, odd, step)
    return np.delete(np.arange(len(keys)), odd)


def _refused(
    spec: TableSpec, keys: np.ndarray, grads: np.ndarray, odd: np.ndarray, step: int
) -> ProgramError:
    row = grads[odd[0]]
    value = row[~np.isfinite(row)][0]
    more = f", nor those of {len(odd) - 1} more keys" if len(odd) > 1 else ""
    where = f"table '{spec.name}', step {step}"
    what = f"{where}: the gradient of key {keys[odd[0]]} is not finite ({value}){more}"
    hint = 'nothing of this push was applied; on_nan="skip" leaves such rows as they are'
    return ProgramError(what, hint=hint)


@compiled("i32[,]", "i64[]!")
def _not_finite(words: np.ndarray, places: np.ndarray) -> int:
    """Writes the places of rows with an element that is not finite; returns how many they are."""
    count = 0
    for i in range(len(words)):
        odd = False
        for j in range(words.shape[1]):  # on bits, as sums of floats are not vectorized
            odd |= (words[i, j] & 0x7F800000) == 0x7F800000
        if odd:
            places[count] = i
            count += 1
    return count
