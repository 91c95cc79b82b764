"""LoDTensor: sequences of different lengths concatenated in one array, with their lengths.

Sequences of 2 and 3 words are an array of 5 rows and the lengths `[[2, 3]]`, or, as offsets (the
"level of detail"), `[[0, 2, 5]]`. Each further level groups the sequences of the level below.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import AssertedError, FeedError, RaggedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.types import dtype_name

Levels = list[list[int]]


class LoDTensor:
    """An array whose rows are sequences.

    The array is set before the lengths, as in fluid, so that they can be checked against it. An
    array set later is checked when it is fed.

    Raises:
        TypeError: lengths are not lists of integers.
        RaggedError: they do not match the rows; like fluid's errors it is both a ValueError and a
            RuntimeError.
    """

    def __init__(self) -> None:
        self._array: np.ndarray | jax.Array = np.zeros((0,), np.float32)
        self._has_array = False
        self._lengths: Levels = []
        self._for: Any = None

    def set(self, array: Any, place: Any = None, zero_copy: bool = False) -> None:
        """Sets the rows of all sequences; a JAX array is not waited for, and none is copied.

        `place` is only stored, as `_place()`: a feed goes where the program runs.
        """
        del zero_copy
        self._for = place
        self._array = array if isinstance(array, jax.Array) else np.asarray(array)
        self._has_array = True

    def set_recursive_sequence_lengths(self, recursive_sequence_lengths: Sequence[Any]) -> None:
        """Sets the lengths, the outermost level first."""
        self._take([_whole_numbers(level) for level in recursive_sequence_lengths])

    def recursive_sequence_lengths(self) -> Levels:
        """Returns the lengths, the outermost level first."""
        return [list(level) for level in self._lengths]

    def has_valid_recursive_sequence_lengths(self) -> bool:
        """Whether the number of elements of each level matches the level around it."""
        return why_not_lengths(self._lengths, len(self._array)) is None

    def set_lod(self, lod: Sequence[Any]) -> None:
        """Sets the lengths as offsets."""
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
        """Sets the lengths after checking them against the rows, if there are any."""
        rows = len(self._array) if self._has_array else None
        if (why := why_not_lengths(lengths, rows)) is not None:
            raise mistake(why, "each level adds up to how many the next has", RaggedError)
        self._lengths = lengths

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def _place(self) -> Any:
        """Returns the place given to `set`, or None."""
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
    """Returns why lengths, the outermost level first, do not match rows; None if they do."""
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


def rows_of_shape(rows: np.ndarray, shape: Sequence[int], name: str) -> np.ndarray:
    """Reshapes rows that lack only axes of size 1 of the declared shape; FeedError otherwise."""
    count = rows.shape[0] if rows.ndim else 0
    if [size for size in rows.shape[1:] if size != 1] == [size for size in shape if size != 1]:
        return rows.reshape(count, *shape)
    what = f"'{name}' is fed rows of shape {list(rows.shape[1:])}, and declared {list(shape)}"
    raise FeedError(what, hint="feed a list of sequences of such rows")


def create_lod_tensor(
    data: Any, recursive_seq_lens: Sequence[Sequence[int]], place: Any = None
) -> LoDTensor:
    """Creates sequences from their rows and lengths.

    Args:
        data: the rows as an array or a LoDTensor; or a list of sequences of numbers, whose rows
            are then `[..., 1]`.
        recursive_seq_lens: the lengths, the outermost level first.
        place: ignored.

    Raises:
        TypeError: the data is of another type.
        AssertionError: the lengths do not match the data.

    Examples:
        >>> import numpy as np
        >>> from jaxfleet import fluid
        >>> rows = np.arange(5.0).reshape(5, 1)
        >>> sequences = fluid.create_lod_tensor(rows, [[2, 3]], fluid.CPUPlace())
        >>> sequences.recursive_sequence_lengths(), sequences.lod()
        ([[2, 3]], [[0, 2, 5]])
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
    """Creates sequences of random integers from `low` to `high`, each row of `base_shape`."""
    check_type(base_shape, "base_shape", (list, tuple))
    rows = sum(recursive_seq_lens[-1])
    drawn = np.random.default_rng().integers(low, high + 1, (rows, *base_shape))
    return create_lod_tensor(drawn, recursive_seq_lens, place)
