"""Python's operators on Variables: `a + b`, `2.0 * a`, `a < b`, `a[1:]`, `a.astype("int64")`.

Each adds an operator to the program, the same as fluid's: `+ - * /` with a number add a `scale`;
any other number becomes an array of one element, or of the shape of the other operand if the number
comes first.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.types import dtype_name

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.block import Block
    from jaxfleet.fluid.framework.variable import Variable

Number: TypeAlias = float | int | np.number[Any]
_NUMBERS = (float, int, np.number)
_Method: TypeAlias = "Callable[[Any, Any], Variable]"


def _scaling(op_type: str, factor: Callable[[float], tuple[float, float]]) -> _Method:
    def method(self: "Variable", other: "Variable | Number") -> "Variable":
        is_exact = not (op_type == "elementwise_div" and _is_whole(self))
        if isinstance(other, _NUMBERS) and is_exact:
            scale, bias = factor(_number(self, other))
            attrs = {"scale": scale, "bias": bias}
            return _added(self, "scale", {"X": self}, attrs, self.dtype)
        return _joined(op_type, self, other)

    return method


def _joining(op_type: str, *, is_reversed: bool = False, dtype: str | None = None) -> _Method:
    def method(self: "Variable", other: "Variable | Number") -> "Variable":
        if is_reversed:
            return _joined(op_type, _filled_like(self, other), self, dtype)
        return _joined(op_type, self, other, dtype)

    return method


class Arithmetic:
    """Base class of Variable with Python's operators."""

    __array_ufunc__: ClassVar[None] = None  # numpy scalars defer to us in `2.0 * variable`
    __iter__: ClassVar[None] = None  # iteration by `[]` alone would never end
    __hash__ = object.__hash__  # `==` adds an operator; a dict still distinguishes variables

    __add__ = __radd__ = _scaling("elementwise_add", lambda number: (1.0, number))
    __sub__ = _scaling("elementwise_sub", lambda number: (1.0, -number))
    __rsub__ = _scaling("elementwise_sub", lambda number: (-1.0, number))
    __mul__ = __rmul__ = _scaling("elementwise_mul", lambda number: (number, 0.0))
    __truediv__ = _scaling("elementwise_div", lambda number: (1.0 / number, 0.0))
    __rtruediv__ = _joining("elementwise_div", is_reversed=True)
    __pow__ = _joining("elementwise_pow")
    __rpow__ = _joining("elementwise_pow", is_reversed=True)
    __floordiv__ = _joining("elementwise_floordiv")
    __mod__ = _joining("elementwise_mod")
    # `object` promises a bool; fluid returns a Variable.
    __eq__ = _joining("equal", dtype="bool")  # type: ignore[assignment]
    __ne__ = _joining("not_equal", dtype="bool")  # type: ignore[assignment]
    __lt__ = _joining("less_than", dtype="bool")
    __le__ = _joining("less_equal", dtype="bool")
    __gt__ = _joining("greater_than", dtype="bool")
    __ge__ = _joining("greater_equal", dtype="bool")

    def __neg__(self) -> "Variable":
        x = _variable(self)
        return _added(x, "scale", {"X": x}, {"scale": -1.0, "bias": 0.0}, x.dtype)

    def astype(self, dtype: Any) -> "Variable":
        """Converts to another dtype."""
        x, wanted = _variable(self), dtype_name(dtype)
        attrs = {"in_dtype": x.dtype, "out_dtype": wanted}
        return _added(x, "cast", {"X": x}, attrs, wanted)

    def __getitem__(self, index: Any) -> "Variable":
        """Slices: an integer drops its axis, a range keeps it."""
        x = _variable(self)
        given = index if isinstance(index, tuple) else (index,)
        parts = [int(part) if isinstance(part, np.integer) else part for part in given]
        if Ellipsis in [part for part in parts if part is Ellipsis]:
            at = next(i for i, part in enumerate(parts) if part is Ellipsis)
            parts[at : at + 1] = [slice(None)] * (len(x.shape) - len(parts) + 1)
        return _part(x, parts)


def _part(x: "Variable", parts: list[Any]) -> "Variable":
    """Adds the slicing operator."""
    if len(parts) > len(x.shape):
        raise mistake(f"'{x.name}' has {len(x.shape)} axes, and {len(parts)} are indexed")
    bounds = [(at, *_bounds(x, part)) for at, part in enumerate(parts) if not _is_whole_axis(part)]
    dropped = [axis for axis, part in enumerate(parts) if isinstance(part, int)]
    if not bounds:
        return _added(x, "assign", {"X": x}, {}, x.dtype)
    axes, starts, ends, strides = (list(each) for each in zip(*bounds, strict=True))
    attrs = {"axes": axes, "starts": starts, "ends": ends}
    if any(stride != 1 for stride in strides):
        if dropped:
            raise mistake("an index has numbers, or steps, and not both")
        return _added(x, "strided_slice", {"Input": x}, {**attrs, "strides": strides}, x.dtype)
    return _added(x, "slice", {"Input": x}, {**attrs, "decrease_axis": dropped}, x.dtype)


def _is_whole_axis(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _bounds(x: "Variable", part: Any) -> tuple[int, int, int]:
    if isinstance(part, int):
        return part, part + 1 if part != -1 else _FAR, 1
    if not isinstance(part, slice):
        raise mistake(f"'{x.name}' is indexed by numbers and ranges, not by {part!r}")
    step = 1 if part.step is None else part.step
    if step < 0:
        raise mistake(f"the step of an index is positive, not {step}", hint="layers.reverse")
    return part.start or 0, _FAR if part.stop is None else part.stop, step


_FAR = 2**31 - 1  # an end that is past every axis


def _variable(given: Any) -> "Variable":
    return given  # type: ignore[no-any-return]  # only Variable inherits these methods


def _joined(
    op_type: str, x: "Variable", y: "Variable | Number", dtype: str | None = None
) -> "Variable":
    other = _filled(x, y, [1])
    if other.dtype != x.dtype:
        other = other.astype(x.dtype)
    axis = 0 if other.shape and other.shape[0] == -1 else -1
    return _added(x, op_type, {"X": x, "Y": other}, {"axis": axis}, dtype or x.dtype)


def _filled(like: "Variable", given: Any, shape: list[int]) -> "Variable":
    """Converts a number to an array of a variable's dtype; returns a variable unchanged."""
    if not isinstance(given, _NUMBERS):
        return _operand(given)
    attrs = {"shape": shape, "dtype": like.dtype, "value": _number(like, given)}
    return _added(like, "fill_constant", {}, attrs, like.dtype, stop_gradient=True)


def _filled_like(like: "Variable", given: Any) -> "Variable":
    """Returns a number as an array of a variable's shape."""
    shape = list(like.shape)
    if not isinstance(given, _NUMBERS) or -1 not in shape:
        return _filled(like, given, shape)
    at = shape.index(-1)
    attrs = {"shape": shape, "dtype": like.dtype, "value": _number(like, given),
             "input_dim_idx": at, "output_dim_idx": at}  # fmt: skip
    op_type = "fill_constant_batch_size_like"
    return _added(like, op_type, {"Input": like}, attrs, like.dtype, stop_gradient=True)


def _operand(given: Any) -> "Variable":
    if not isinstance(given, Arithmetic):
        what = f"a Variable goes with Variables and numbers, not with {type(given).__name__}"
        raise mistake(what, kind=WrongTypeError)
    return _variable(given)


def _number(beside: "Variable", given: Number) -> float:
    number = float(given)
    if _is_whole(beside) and not number.is_integer():
        what = f"'{beside.name}' is {beside.dtype}, and {number} is no whole number"
        raise mistake(what, hint=f"cast '{beside.name}' first")
    return number


def _is_whole(x: "Variable") -> bool:
    return x.dtype.startswith(("int", "uint"))


def _added(
    x: "Variable",
    op_type: str,
    inputs: dict[str, Any],
    attrs: dict[str, Any],
    dtype: str,
    *,
    stop_gradient: bool = False,
) -> "Variable":
    block: Block = x.block.program.current_block()
    name = unique_name.generate("tmp")
    out = block.create_var(name=name, dtype=dtype, stop_gradient=stop_gradient)
    block.append_op(op_type, inputs, {"Out": out}, attrs)
    return out
