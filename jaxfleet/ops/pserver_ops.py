"""Operators that parameter-server passes insert, on devices and on the host.

Host operators (`send`, `recv`, ...) are registered so that programs with them verify and keep them;
the runtime executes them.
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
