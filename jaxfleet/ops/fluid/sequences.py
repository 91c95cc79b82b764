"""Operators on sequences: their rows one after the other, and how many each has.

`XLengths`, `i32[sequences]`, is a slot of ours: fluid's arrays know their lengths themselves. There
may be more rows than the lengths add up to; they belong to no sequence, and change no result.
"""

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array


def owners_of(rows: int, lengths: Array | None) -> Array:
    """Returns the sequence that each row is of; for a row of none, how many there are.

    Raises:
        ValueError: there are no lengths.
    """
    if lengths is None:
        raise ValueError("its input has no sequences: their lengths are not known")
    return jnp.searchsorted(jnp.cumsum(lengths), jnp.arange(rows), side="right")


def starts_of(lengths: Array) -> Array:
    """Returns the first row of each sequence."""
    return jnp.cumsum(lengths) - lengths


def _beside(x: Array, numbers: Array) -> Array:
    """Returns a number for each row with the axes that let it stand beside the rows."""
    return numbers.reshape(-1, *[1] * (x.ndim - 1))


@fluid_op("sequence_pool", inputs="X XLengths?", outputs="Out MaxIndex",
          attrs={"pooltype": "AVERAGE", "is_test": False, "pad_value": 0.0},
          gradient=Gradient("sequence_pool_grad", ("X", "XLengths", "MaxIndex"), ("X",),
                            only_if={"MaxIndex": ("pooltype", "MAX")}))  # fmt: skip
def sequence_pool(attrs: Attributes, x: Array, lengths: Array | None) -> Value:
    """Makes one row of each sequence; an empty one is `pad_value`."""
    owners = owners_of(x.shape[0], lengths)
    assert lengths is not None
    shape = (lengths.shape[0], *x.shape[1:])
    if attrs["pooltype"] == "MAX":
        index = _first_largest(x, owners, lengths.shape[0])
        made = jnp.take_along_axis(x, index, axis=0)
    else:
        index = jnp.zeros(shape, jnp.int32)
        made = _pooled(attrs["pooltype"], x, owners, lengths)
    return jnp.where(
        _beside(x, lengths == 0), jnp.asarray(attrs["pad_value"], x.dtype), made
    ), index


def _pooled(kind: str, x: Array, owners: Array, lengths: Array) -> Array:
    count = lengths.shape[0]
    starts = starts_of(lengths)
    match kind:
        case "FIRST":
            return jnp.take(x, starts, axis=0, mode="clip")
        case "LAST":
            return jnp.take(x, starts + jnp.maximum(lengths, 1) - 1, axis=0, mode="clip")
    total = jax.ops.segment_sum(x, owners, count)
    share = jnp.maximum(lengths, 1).astype(x.dtype)
    match kind:
        case "AVERAGE":
            return total / _beside(x, share)
        case "SQRT":
            return total / _beside(x, jnp.sqrt(share))
    return total


def _first_largest(x: Array, owners: Array, count: int) -> Array:
    """Returns, for each sequence and column, the row that has the largest element first."""
    largest = jax.ops.segment_max(jax.lax.stop_gradient(x), owners, count)
    known = jnp.take(largest, owners, axis=0, mode="clip")
    rows = _beside(x, jnp.arange(x.shape[0]))
    candidates = jnp.where(x == known, rows, x.shape[0])
    first = jax.ops.segment_min(candidates, owners, count)
    return jnp.clip(first, 0, x.shape[0] - 1).astype(jnp.int32)


@fluid_op("sequence_softmax", inputs="X XLengths?", attrs={"use_cudnn": False},
          gradient=Gradient("sequence_softmax_grad", ("X", "XLengths", "Out"), ("X",)))  # fmt: skip
def sequence_softmax(_: Attributes, x: Array, lengths: Array | None) -> Array:
    """Makes the elements of each sequence positive, with sum 1."""
    owners = owners_of(x.shape[0], lengths)
    assert lengths is not None
    count = lengths.shape[0] + 1  # rows of no sequence are one of their own
    largest = jax.ops.segment_max(jax.lax.stop_gradient(x), owners, count)
    grown = jnp.exp(x - largest[owners])
    return grown / jax.ops.segment_sum(grown, owners, count)[owners]


@fluid_op("sequence_expand", inputs="X Y YLengths?", attrs={"ref_level": -1},
          gradient=Gradient("sequence_expand_grad", ("X", "Y", "YLengths"), ("X",)))  # fmt: skip
def sequence_expand(_: Attributes, x: Array, y: Array, lengths: Array | None) -> Array:
    """Repeats each row as often as the sequence of its number has rows."""
    return jnp.take(x, owners_of(y.shape[0], lengths), axis=0, mode="clip")


@fluid_op("sequence_conv", inputs="X Filter XLengths?",
          attrs={"contextLength": 3, "contextStart": -1, "contextStride": 1,
                 "paddingTrainable": False},
          gradient=Gradient("sequence_conv_grad", ("X", "Filter", "XLengths"),
                            ("X", "Filter")))  # fmt: skip
def sequence_conv(attrs: Attributes, x: Array, filters: Array, lengths: Array | None) -> Array:
    """Multiplies what stands around each row of a sequence by a matrix; beyond its ends is 0."""
    rows = jnp.arange(x.shape[0])
    owners = owners_of(x.shape[0], lengths)
    around = []
    for at in range(attrs["contextLength"]):
        places = rows + attrs["contextStart"] + at
        inside = jnp.clip(places, 0, x.shape[0] - 1)
        is_same = (places == inside) & (owners[inside] == owners)
        around.append(jnp.where(is_same[:, None], x[inside], 0))
    return jnp.concatenate(around, axis=1) @ filters


for _type in ("sequence_pool", "sequence_softmax", "sequence_expand", "sequence_conv"):
    define_gradient(_type)
