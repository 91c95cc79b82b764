"""Values of `const` variables: their digests, and those that are small enough to print.

A digest covers a value's type and bytes, so equal constants have equal digests in every process.
Values are numpy arrays, including `ml_dtypes`.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir.attributes import Attr, Word
from jaxfleet.ir.dims import Size
from jaxfleet.ir.variable import Constant, Variable, long_dtype, short_dtype, type_text

MAX_INLINE = 8  # values in a line; a longer list is not readable
_INLINE_DTYPES = frozenset(
    {"bool", "f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"}
)
_NAN = Word("nan")
_FLOAT0 = np.dtype([("float0", np.void, 0)])  # jax's dtype of a gradient that cannot exist


def make_constant(value: Any) -> Constant:
    """Returns the constant for an array.

    Args:
        value: a numpy array or a value that numpy converts to one, numbers only.

    Raises:
        ProgramError: the value is not an array of numbers.
    """
    array = np.asarray(value)
    dtype = dtype_of(array)
    data = raw_bytes(array)
    text = type_text(dtype, array.shape)
    digest = hashlib.sha256(text.encode() + b"\n" + data).hexdigest()
    return Constant(f"c{digest[:16]}", array)


def dtype_of(array: Any) -> str:
    """Returns the IR's name of an array's dtype.

    Raises:
        ProgramError: its elements are not numbers.
    """
    dtype = array.dtype
    if dtype == _FLOAT0:
        return "float0"
    if dtype.kind in "OSUMm" or dtype.names is not None:
        raise ProgramError(f"a constant cannot hold dtype {dtype}", hint="give numbers")
    return short_dtype(dtype.name)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the numpy dtype for an IR name.

    Raises:
        ProgramError: numpy has no such dtype.
    """
    if dtype == "float0":
        return _FLOAT0
    name = long_dtype(dtype)
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise ProgramError(f"numpy has no dtype '{dtype}'") from error


def raw_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Returns an array's elements, row by row, in little-endian order."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes()


def inline_values(variable: Variable) -> tuple[Attr, ...] | None:
    """Returns a constant's values to print in its line, or None if it prints by its digest.

    They print if they are few and parse to the same constant.
    """
    constant = variable.constant
    if constant is None or constant.value is None or variable.dtype not in _INLINE_DTYPES:
        return None
    array = np.asarray(constant.value)
    if array.size > MAX_INLINE or array.shape != variable.shape:
        return None
    values = tuple(_printed(item) for item in array.ravel())
    try:
        same = constant_of(values, variable.dtype, array.shape) == constant
    except ProgramError:
        return None
    return values if same else None


def constant_of(values: Sequence[Attr], dtype: str, shape: Sequence[Size]) -> Constant:
    """Returns the constant for values printed in a line.

    Raises:
        ProgramError: the values do not fit the type.
    """
    wanted = numpy_dtype(dtype)
    fitting = (bool,) if dtype == "bool" else (int,) if wanted.kind in "iu" else (int, float)
    numbers = [math.nan if value == _NAN else value for value in values]
    sizes = [size for size in shape if isinstance(size, int)]
    fits = all(type(number) in fitting for number in numbers)
    if not fits or len(sizes) != len(shape) or math.prod(sizes) != len(numbers):
        raise ProgramError(f"the values do not fit {type_text(dtype, tuple(shape))}")
    try:
        with np.errstate(all="ignore"):  # overflow becomes inf
            array = np.array(numbers, dtype=wanted).reshape(sizes)
    except OverflowError as error:
        raise ProgramError(f"a value is too large for {dtype}") from error
    return make_constant(array)


def _printed(item: Any) -> Attr:
    """Returns the shortest attribute for a numpy number that parses to the same number."""
    if item.dtype.kind not in "fV":
        number: int | bool = item.item()
        return number
    value = float(str(item))  # of a float32 this is 0.1, where item.item() is 0.10000000149011612
    return _NAN if math.isnan(value) else value
