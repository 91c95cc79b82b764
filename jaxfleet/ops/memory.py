"""Operators that say where memory is let go: `cut` and `delete_var`. They compute nothing."""

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
