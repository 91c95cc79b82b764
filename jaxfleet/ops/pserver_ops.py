"""Operators that parameter-server passes insert, and those of embedding look-ups.

Host operators (`send`, `recv`, ...) are registered so that programs with them verify and keep them;
the runtime executes them.

`table_lookup` is the captured form of a look-up: rows of a table by keys. No device can run it,
since it has no table; `sparse_table` makes it a `distributed_lookup_table` of the host and a
`lookup_rows` of the device. So that a step can be checked before that, its meaning here is that of
a table whose rows are all equal: each row is the handle, and the handle's gradient is the sum of
theirs.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ir.op_traits import HOST_OPS
from jaxfleet.ops.collective import attr
from jaxfleet.ops.registry import Array, Context, register_op


@register_op("sum")
def sum_all(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Adds its inputs, from left to right."""
    total = jnp.asarray(inputs[0])
    for value in inputs[1:]:
        total = total + value
    return [total]


@register_op("scale")
def scale(_: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Multiplies by `scale` and adds `bias`, after it unless `bias_after_scale` is false."""
    value = jnp.asarray(inputs[0])
    factor: Any = op.attrs.get("scale", 1.0)
    bias: Any = op.attrs.get("bias", 0.0)
    factor, bias = (np.asarray(number, value.dtype) for number in (factor, bias))
    if not bias:
        return [value * factor]
    if op.attrs.get("bias_after_scale", True):
        return [value * factor + bias]
    return [(value + bias) * factor]


@register_op("split_byref")
def split_byref(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Cuts `X` along its rows into `Out`, `sections` rows each."""
    ends = np.cumsum([0, *attr(ctx, op, "sections")]).tolist()
    value = jnp.asarray(inputs[0])
    if ends[-1] != value.shape[0]:
        what = f"split_byref: the sections are {ends[-1]} rows in all, and X has {value.shape[0]}"
        raise ProgramError(what, op=op)
    return [lax.slice_in_dim(value, start, stop) for start, stop in pairwise(ends)]


@register_op("concat")
def concat(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Joins its inputs along `axis`, rows by default."""
    axis = attr(ctx, op, "axis") if "axis" in op.attrs else 0
    return [jnp.concatenate([jnp.asarray(value) for value in inputs], axis=axis)]


def _on_the_host(_: Context, op: Operator, __: Sequence[Array]) -> NoReturn:
    hint = "a trainer's or a server's program is run by jaxfleet.ps, not as one function"
    raise ProgramError(f"'{op.type}' runs on the host, not on a device", op=op, hint=hint)


for _name in HOST_OPS:
    register_op(_name)(_on_the_host)


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
