"""Variables of the IR: kind, type (`f32[b,784]`), and the values of constants.

A digest covers a constant's type and bytes, so equal constants have equal digests in every process.
Values are numpy arrays, including `ml_dtypes`.
"""

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir.attributes import Attr, Word
from jaxfleet.ir.dims import Size
from jaxfleet.ir.naming import dtype_text, name_text

# Short names as in jax and HLO; any other dtype keeps its name (`key<fry>`, `float0`).
_SHORT: Mapping[str, str] = {
    "bool": "bool",
    "bfloat16": "bf16",
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"complex{bits}": f"c{bits}" for bits in (64, 128)},
}
RAW = "raw"  # the dtype of values outside device computation: ordering tokens, handles
_LONG: Mapping[str, str] = {short: name for name, short in _SHORT.items()}


def short_dtype(name: str) -> str:
    """Returns the IR's name of a numpy dtype: `f32` for `float32`."""
    return _SHORT.get(name, name)


def long_dtype(short: str) -> str:
    """Returns numpy's name of a dtype: `float32` for `f32`."""
    return _LONG.get(short, short)


class Kind(enum.Enum):
    """The purpose of a variable.

    `data` is fed; `param` and `state` persist across steps; `const` never changes; `temp` exists
    within one step.
    """

    DATA = "data"
    PARAM = "param"
    STATE = "state"
    CONST = "const"
    TEMP = "temp"

    @property
    def persistable(self) -> bool:
        """Whether the variable outlives a step."""
        return self in {Kind.PARAM, Kind.STATE}


@dataclass(frozen=True, slots=True)
class Constant:
    """The value of a `const` variable.

    Attributes:
        digest: identifies the bytes; constants with equal digests are equal.
        value: a numpy array, or None if only the program's text is available.
    """

    digest: str
    value: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Variable:
    """A named value.

    Attributes:
        name: unique among the variables visible to an operator.
        dtype: the IR's name of its dtype: `f32`.
        shape: a size for each axis.
        kind: its purpose.
        constant: its value, for a `const`.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    kind: Kind = Kind.TEMP
    constant: Constant | None = None

    @property
    def type(self) -> str:
        """The type as it prints: `f32[b,784]`."""
        return type_text(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{name_text(self.name)}: {self.type}"


@lru_cache(maxsize=1 << 12)
def type_text(dtype: str, shape: tuple[Size, ...]) -> str:
    """Returns a type as it prints: `f32[b,784]`."""
    return f"{dtype_text(dtype)}[{','.join(map(str, shape))}]"


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
