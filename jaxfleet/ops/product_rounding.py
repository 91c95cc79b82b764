"""Rounds each product before it is added, so that an element's result is the same in any loop.

A processor can add an unrounded product: `a * b + c * d` then rounds one of the two. LLVM chooses
which one anew in each loop that it makes of a computation, separately for vectors and remainders,
and the loops depend on the number of rows: the same element may differ in its last digit between an
array and a slice of it. A product whose bits pass through an integer operation is rounded like any
other number. The operation is an exclusive or with a zero unknown to the compiler, which therefore
cannot remove it; it costs less than the memory traffic of the block around it.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import lax

from jaxfleet.ir import Operator
from jaxfleet.ops.registry import Array, Context, Meaning

_UNSIGNED: Mapping[int, str] = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}  # by bytes

# These never end in a product; all other operators may, by themselves or as XLA rewrites them (a
# division by a constant is a product).
_LISTED = """
    assign concat put_rows split_byref sum take_rows
    jax.abs jax.add jax.add_any jax.broadcast_in_dim jax.ceil jax.clamp jax.concatenate
    jax.convert_element_type jax.copy jax.cummax jax.cummin jax.dynamic_slice
    jax.dynamic_update_slice jax.expand_dims jax.floor jax.gather jax.iota jax.max jax.min
    jax.neg jax.pad jax.reduce_max jax.reduce_min jax.reduce_precision jax.reduce_sum
    jax.reshape jax.rev jax.round jax.select_n jax.sign jax.slice jax.sort jax.split jax.squeeze
    jax.stop_gradient jax.sub jax.transpose
"""
_NO_PRODUCT = frozenset(_LISTED.split())


def rounding(meaning: Meaning, zero: Array) -> Meaning:
    """Returns an operator's meaning with each product in it rounded.

    An inverse root, which processors approximate, is one over a root.
    """

    def run(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
        if op.type == "jax.rsqrt":
            root = rounded("jax.sqrt", lax.sqrt(inputs[0]), zero)
            return [rounded("jax.div", 1 / root, zero)]
        return [rounded(op.type, value, zero) for value in meaning(ctx, op, inputs)]

    return run


def rounded(op_type: str, value: Array, zero: Array) -> Array:
    """Returns an operator's result, rounded; only floats change.

    `zero` is a `u32[]`, a zero unknown to the compiler.
    """
    dtype = jnp.asarray(value).dtype
    if op_type in _NO_PRODUCT or not jnp.issubdtype(dtype, jnp.floating):
        return value
    bits = jnp.dtype(_UNSIGNED[dtype.itemsize])
    as_bits = lax.bitcast_convert_type(value, bits)
    return lax.bitcast_convert_type(as_bits ^ zero.astype(bits), dtype)
