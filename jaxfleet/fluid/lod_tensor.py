"""LoDTensor: sequences of unequal lengths, one after the other in one array, with their lengths.

Sequences of 2 and 3 words are an array of 5 rows and the lengths `[[2, 3]]`, or, as offsets (the
"level of detail"), `[[0, 2, 5]]`. A level more groups the sequences, and so on.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import AssertedError, RaggedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.dtypes import dtype_name

Levels = list[list[int]]


class LoDTensor:
    """An array whose rows are sequences.

    The array is set before the lengths, as with fluid, so that they can be checked against it. One
    that is set later is checked when it is fed.

    Raises:
        TypeError: lengths are no lists of whole numbers.
        RaggedError: they are not those of the rows; as fluid's error it is a ValueError, and a
            RuntimeError too.
    """

    def __init__(self) -> None:
        self._array: np.ndarray | jax.Array = np.zeros((0,), np.float32)
        self._has_array = False
        self._lengths: Levels = []
        self._for: Any = None

    def set(self, array: Any, place: Any = None, zero_copy: bool = False) -> None:
        """Takes the rows of all sequences.

        Args:
            array: the rows; a JAX array is not waited for.
            place: what it is meant for, kept as `_place()`; a feed goes where the program runs.
            zero_copy: taken; the array is never copied here.
        """
        del zero_copy
        self._for = place
        self._array = array if isinstance(array, jax.Array) else np.asarray(array)
        self._has_array = True

    def set_recursive_sequence_lengths(self, recursive_sequence_lengths: Sequence[Any]) -> None:
        """Takes the lengths, the outermost level first."""
        self._take([_whole_numbers(level) for level in recursive_sequence_lengths])

    def recursive_sequence_lengths(self) -> Levels:
        """Returns the lengths, the outermost level first."""
        return [list(level) for level in self._lengths]

    def has_valid_recursive_sequence_lengths(self) -> bool:
        """Tells whether each level has as many elements as the one around it says."""
        return why_not_lengths(self._lengths, len(self._array)) is None

    def set_lod(self, lod: Sequence[Any]) -> None:
        """Takes the lengths as offsets."""
        levels = [_whole_numbers(level) for level in lod]
        for level in levels:
            if level[:1] != [0] or any(b < a for a, b in pairwise(level)):
                what = f"{level} are no offsets of sequences"
                hint = (
                    "offsets begin with 0 and never fall: sequences of 2 and 3 rows are [0, 2, 5]"
                )
                raise mistake(what, hint, RaggedError)
        self._take([[b - a for a, b in pairwise(level)] for level in levels])

    def lod(self) -> Levels:
        """Returns the lengths as offsets."""
        return [[0, *accumulate(level)] for level in self._lengths]

    def _take(self, lengths: Levels) -> None:
        """Takes lengths that fit the rows, where there are some yet."""
        rows = len(self._array) if self._has_array else None
        if (why := why_not_lengths(lengths, rows)) is not None:
            raise mistake(why, "each level adds up to how many the next has", RaggedError)
        self._lengths = lengths

    def shape(self) -> list[int]:
        """Returns the sizes of the array."""
        return list(self._array.shape)

    def _place(self) -> Any:
        """Returns the place that `set` was given; None unless one was."""
        return self._for

    def _dtype(self) -> str:
        """Returns the name of the dtype, such as `float32`."""
        return dtype_name(self._array.dtype)

    def __len__(self) -> int:
        return len(self._array)

    def __jax_array__(self) -> jax.Array:
        return jax.numpy.asarray(self._array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"LoDTensor({np.asarray(self._array)!r}, lengths={self._lengths})"


def why_not_lengths(lengths: Levels, rows: int | None) -> str | None:
    """Returns why lengths are not those of sequences; None if they are.

    Args:
        lengths: the outermost level first.
        rows: how many there are; None while nobody knows.
    """
    for level in lengths:
        if any(length < 0 for length in level):
            return f"the lengths {level} are not all 0 or more"
    for level, inner in pairwise(lengths):
        if sum(level) != len(inner):
            return (
                f"the lengths {level} add up to {sum(level)}, and the next level has {len(inner)}"
            )
    if lengths and rows is not None and sum(lengths[-1]) != rows:
        return f"the lengths {lengths[-1]} add up to {sum(lengths[-1])}, and there are {rows} rows"
    return None


def _whole_numbers(level: Any) -> list[int]:
    check_type(level, "a level of lengths", (list, tuple, np.ndarray))
    for number in level:
        check_type(number, "a length", (int, np.integer))
    return [int(number) for number in level]


def create_lod_tensor(
    data: Any, recursive_seq_lens: Sequence[Sequence[int]], place: Any = None
) -> LoDTensor:
    """Returns sequences made of their rows and lengths.

    Args:
        data: the rows as an array, or as a LoDTensor; or a list of sequences of numbers, whose
            rows are then `[..., 1]`.
        recursive_seq_lens: the lengths, the outermost level first.
        place: taken.

    Raises:
        TypeError: the data are none of these.
        AssertionError: the lengths do not fit the data.
    """
    check_type(data, "the data of a LoDTensor", (LoDTensor, np.ndarray, list))
    if isinstance(data, list):
        found = [[len(sequence) for sequence in data]]
        if found != [list(level) for level in recursive_seq_lens]:
            what = f"the sequences have the lengths {found}, and {recursive_seq_lens} are given"
            raise mistake(what, kind=AssertedError)
        rows = [number for sequence in data for number in sequence]
        data = np.asarray(rows, np.int64).reshape(-1, 1)
    made = LoDTensor()
    made.set(data, place)
    lengths = [_whole_numbers(level) for level in recursive_seq_lens]
    if (why := why_not_lengths(lengths, len(made._array))) is not None:
        hint = "each level adds up to how many the next has, and the last to the rows"
        raise mistake(why, hint, AssertedError)
    made.set_recursive_sequence_lengths(lengths)
    return made


def create_random_int_lodtensor(
    recursive_seq_lens: Sequence[Sequence[int]],
    base_shape: Sequence[int],
    place: Any,
    low: int,
    high: int,
) -> LoDTensor:
    """Returns sequences of whole numbers from `low` to `high`, each row of `base_shape`."""
    check_type(base_shape, "base_shape", (list, tuple))
    rows = sum(recursive_seq_lens[-1])
    drawn = np.random.default_rng().integers(low, high + 1, (rows, *base_shape))
    return create_lod_tensor(drawn, recursive_seq_lens, place)
