"""Operators that every program uses: `assign` and `fetch`."""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxfleet.ir import Operator
from jaxfleet.ops.registry import Array, Context, register_op


@register_op("assign")
def assign(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Copies its inputs to its outputs."""
    return [jnp.asarray(value) for value in inputs]


@register_op("fetch", has_effect=True)
def fetch(_: Context, __: Operator, ___: Sequence[Array]) -> Sequence[Array]:
    """Marks what a step returns besides its state; computes nothing."""
    return []
