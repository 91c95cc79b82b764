"""Layers that compare, and that join truth values."""

from collections.abc import Callable

from jaxfleet.fluid.layers.one_operator import one_operator
from jaxfleet.fluid.variable import Variable


def _compared(op_type: str) -> Callable[..., Variable]:
    @one_operator(op_type, X="x", Y="y", into="cond", dtype="bool", frozen=True)
    def layer(x: Variable, y: Variable, cond: Variable | None = None) -> Variable: ...

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"Applies `{op_type}` element by element, into `cond` if it is given."
    return layer


@one_operator("less_than", X="x", Y="y", into="cond", dtype="bool", frozen=True)
def less_than(
    x: Variable, y: Variable, force_cpu: bool | None = None, cond: Variable | None = None
) -> Variable:
    """Tells which elements are smaller, into `cond` if it is given."""


less_equal, greater_than = _compared("less_equal"), _compared("greater_than")
greater_equal, equal, not_equal = (_compared(n) for n in ("greater_equal", "equal", "not_equal"))


def _joined(op_type: str) -> Callable[..., Variable]:
    @one_operator(op_type, X="x", Y="y", into="out", dtype="bool", frozen=True)
    def layer(
        x: Variable, y: Variable, out: Variable | None = None, name: str | None = None
    ) -> Variable: ...

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"Applies `{op_type}` element by element, into `out` if it is given."
    return layer


logical_and, logical_or = _joined("logical_and"), _joined("logical_or")
logical_xor = _joined("logical_xor")


@one_operator("logical_not", X="x", into="out", dtype="bool", frozen=True)
def logical_not(x: Variable, out: Variable | None = None, name: str | None = None) -> Variable:
    """Tells which elements are false, into `out` if it is given."""


@one_operator("is_empty", X="x", into="cond", dtype="bool", frozen=True)
def is_empty(x: Variable, cond: Variable | None = None) -> Variable:
    """Tells whether an array has no elements: `[1]`."""
