"""Variables of the IR: kind, type, and how a type is printed (`f32[b,784]`)."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

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
