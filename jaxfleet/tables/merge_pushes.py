"""Merging of several trainers' pushes by row, and handling of non-finite gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import mixed
from jaxfleet.tables.numba_jit import compiled
from jaxfleet.tables.spec import TableSpec


def finite(spec: TableSpec, keys: np.ndarray, grads: np.ndarray, step: int) -> np.ndarray | slice:
    """Returns the positions of the finite gradients, float32[n, dim], or a slice if all are.

    Raises:
        ProgramError: keys and gradients do not match, or a gradient is not finite and the table
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
    """Writes the positions of rows with a non-finite element; returns their number."""
    count = 0
    for i in range(len(words)):
        odd = False
        for j in range(words.shape[1]):  # on bits, as sums of floats are not vectorized
            odd |= (words[i, j] & 0x7F800000) == 0x7F800000
        if odd:
            places[count] = i
            count += 1
    return count


def merge(pushes: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns each key once, in order of first occurrence, with the sum of its gradients.

    The summands of a key are added in the order of the pushes, independent of other keys, so the
    result is the same to the bit however servers divide the keys.

    Args:
        pushes: pairs of int64[n] and float32[n, dim], one or more.
    """
    most = sum(len(keys) for keys, _ in pushes)
    keys = np.empty(most, np.int64)
    sums = np.empty((most, pushes[0][1].shape[1]), np.float32)
    places = np.full(2 << max(1, most).bit_length(), -1, np.int32)  # at most half full
    count = 0
    for some, grads in pushes:
        some_keys = np.require(some, np.int64, ["C", "A"])
        summands = np.require(grads, np.float32, ["C", "A"])
        count = _merge(some_keys, summands, places, keys, sums, count)
    return keys[:count], sums[:count]


@compiled("i64[]", "f32[,]", "i32[]!", "i64[]!", "f32[,]!", "i64")
def _merge(
    some: np.ndarray,
    grads: np.ndarray,
    places: np.ndarray,
    keys: np.ndarray,
    sums: np.ndarray,
    count: int,
) -> int:
    """Adds a push to the sums; returns the number of keys so far."""
    mask = np.uint64(len(places) - 1)
    for i in range(len(some)):
        at = mixed(np.uint64(some[i])) & mask
        while places[at] >= 0 and keys[places[at]] != some[i]:
            at = (at + np.uint64(1)) & mask
        place = places[at]
        if place >= 0:
            for j in range(grads.shape[1]):
                sums[place, j] += grads[i, j]
            continue
        places[at] = count
        keys[count] = some[i]
        for j in range(grads.shape[1]):
            sums[count, j] = grads[i, j]
        count += 1
    return count


@dataclass
class PendingScores:
    """Shows and clicks counted since the last `take`; empty if steps provide none."""

    _counted: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._counted)

    def add(self, keys: np.ndarray, shows: np.ndarray | None, clicks: np.ndarray | None) -> None:
        """Adds the counts of a step, float32[n] each, if any, for unique keys, int64[n]."""
        if shows is not None or clicks is not None:
            none = np.zeros(len(keys), np.float32)
            given = [none if counts is None else counts for counts in (shows, clicks)]
            self._counted.append((keys, np.stack(given, axis=1)))

    def take(self, keys: np.ndarray) -> np.ndarray:
        """Returns float32[n, 2], the counts of keys, which include all counted, and resets them."""
        found = np.zeros((len(keys), 2), np.float32)
        if self._counted:
            scored, sums = merge(self._counted)
            order = np.argsort(keys)
            found[order[np.searchsorted(keys, scored, sorter=order)]] = sums
        self._counted.clear()
        return found
