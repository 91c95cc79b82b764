"""Operators of embedding look-ups: as captured, and as run on a device.

`table_lookup` is the captured form: rows of a table by keys. No device can run it, since it has no
table; `sparse_table` makes it a `distributed_lookup_table` of the host and a `lookup_rows` of the
device. So that a step can be checked before that, its meaning here is that of a table whose rows
are all equal: each row is the handle, and the handle's gradient is the sum of theirs.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxfleet.ir import Operator
from jaxfleet.ops.collective import attr
from jaxfleet.ops.registry import Array, Context, register_op

LOOKUP = "table_lookup"
LOOKUP_GRAD = "table_lookup_grad"


@register_op(LOOKUP)
def table_lookup(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Returns the row of each key: `f32[..., dim]` of a handle `f32[]` and keys `[...]`."""
    handle, keys = inputs
    shape = (*jnp.shape(keys), attr(ctx, op, "dim"))
    return [jnp.broadcast_to(jnp.asarray(handle, jnp.float32), shape)]


@register_op(LOOKUP_GRAD)
def table_lookup_grad(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Returns the handle's gradient, from the keys and the gradient of their rows."""
    return [jnp.sum(jnp.asarray(inputs[1]))]


@register_op("lookup_rows")
def lookup_rows(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Takes `rows[index]`; every index is valid, as the host made it."""
    rows, index = inputs
    return [jnp.asarray(rows).at[index].get(mode="promise_in_bounds")]


@register_op("take_rows")
def take_rows(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Takes rows by their numbers; zeros for a number without a row."""
    whole, numbers = inputs
    return [jnp.asarray(whole).at[numbers].get(mode="fill", fill_value=0)]


@register_op("put_rows")
def put_rows(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Writes rows at their numbers, which are distinct and sorted; drops out-of-range rows."""
    whole, rows, numbers = inputs
    at = jnp.asarray(whole).at[numbers]
    return [at.set(rows, mode="drop", indices_are_sorted=True)]


@register_op("lookup_rows_grad")
def lookup_rows_grad(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Sums the gradients of each row: `f32[u, dim]`, `shape`, from an index and gradients."""
    index, gradient = inputs
    rows, dim = attr(ctx, op, "shape")
    total = jnp.zeros((rows, dim), jnp.float32)
    flat = jnp.asarray(gradient).reshape(-1, dim)
    return [total.at[jnp.reshape(index, -1)].add(flat, mode="promise_in_bounds")]
