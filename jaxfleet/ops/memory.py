"""Operators that say where memory is let go, or whose it is. They compute nothing.

`to_host` and `to_device` move a value between executables. Where a program runs as one, there is
no between, and they hand on what they are given.
"""

from collections.abc import Sequence

from jaxfleet.ir import Operator
from jaxfleet.ops.registry import Array, Context, register_op


@register_op("cut", has_effect=True)
def cut(_: Context, __: Operator, ___: Sequence[Array]) -> Sequence[Array]:
    """Ends an executable: what follows is compiled apart from what stands before."""
    return []


@register_op("delete_var", has_effect=True)
def delete_var(_: Context, __: Operator, ___: Sequence[Array]) -> Sequence[Array]:
    """Says that nothing reads its inputs any more."""
    return []


@register_op("to_host", has_effect=True)
def to_host(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Copies a value to pinned memory of the host."""
    return inputs


@register_op("to_device", has_effect=True)
def to_device(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Copies a value from pinned memory of the host to the device's."""
    return inputs
