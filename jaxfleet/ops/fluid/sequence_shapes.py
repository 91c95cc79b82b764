"""Operators that make sequences of other lengths, put each on a row of an array, and take it back.

`XLengths`, `XPlaces`, `XRoom` and `OutLengths` are slots of ours: the lengths of sequences, and
arrays whose one size is that of the longest (`jaxfleet.fluid.ragged`). What an operator makes has
rows to spare where its lengths are known in a run alone; those are zero.
"""

from typing import Any

import jax.numpy as jnp

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.fluid.sequences import owners_of, starts_of
from jaxfleet.ops.registry import Array


def padded(x: Array, lengths: Array | None, most: int, fill: Any = 0) -> Array:
    """Returns sequences as an array `[b,most,...]`, with a value behind their ends.

    Raises:
        ValueError: there are no lengths.
    """
    if lengths is None:
        raise ValueError("its input has no sequences: their lengths are not known")
    places = starts_of(lengths)[:, None] + jnp.arange(most)
    is_there = jnp.arange(most) < lengths[:, None]
    rows = jnp.take(x, places, axis=0, mode="clip")
    return jnp.where(is_there.reshape(*is_there.shape, *[1] * (x.ndim - 1)), rows, fill)


def _taken(x: Array, rows: Array, is_there: Array) -> Array:
    """Returns rows by number, zeros where there are none."""
    made = jnp.take(x, rows, axis=0, mode="clip")
    return jnp.where(is_there.reshape(-1, *[1] * (x.ndim - 1)), made, 0)


def _unless(is_wrong: Array, x: Array) -> Array:
    """Returns an array, and NaN in its place where what asked for it cannot be had."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(is_wrong.any(), jnp.nan, x)


@fluid_op("sequence_pad", inputs="X PadValue XLengths? XPlaces?", outputs="Out Length",
          attrs={"padded_length": -1},
          gradient=Gradient("sequence_pad_grad", ("X", "PadValue", "XLengths", "XPlaces"),
                            ("X",)))  # fmt: skip
def sequence_pad(
    attrs: Attributes, x: Array, fill: Array, lengths: Array | None, places: Array | None
) -> Value:
    """Puts each sequence on a row, with a value behind its end: `[rows,...]` -> `[b,longest,...]`.

    Raises:
        ValueError: nothing says how long the longest is.
    """
    most = attrs["padded_length"]
    if most < 0:
        if places is None:
            raise ValueError("nothing says how long the longest of its sequences is")
        most = len(places)
    made = padded(x, lengths, most, fill.astype(x.dtype))
    assert lengths is not None
    return _unless(lengths > most, made), lengths


@fluid_op("sequence_unpad", inputs="X Length Like?", outputs="Out OutLengths?",
          attrs={"spare_rows": 0},
          gradient=Gradient("sequence_unpad_grad", ("X", "Length", "Like"), ("X",)))  # fmt: skip
def sequence_unpad(attrs: Attributes, x: Array, length: Array, like: Array | None) -> Value:
    """Takes sequences off the rows of an array: `[b,most,...]` -> `[rows,...]`.

    `Like` is ours: what has as many rows, where that is known.
    """
    count, most = x.shape[:2]
    lengths = length.reshape(-1).astype(jnp.int32)
    rows = count * most + attrs["spare_rows"] if like is None else like.shape[0]
    owners = owners_of(rows, lengths)
    at = jnp.clip(owners, 0, count - 1)
    place = jnp.arange(rows) - starts_of(lengths)[at]
    made = _taken(x.reshape(-1, *x.shape[2:]), at * most + place, owners < count)
    return _unless(lengths > most, made), lengths


@fluid_op("sequence_concat", inputs="X* XLengths*?", outputs="Out OutLengths?",
          attrs={"spare_rows": 0},
          gradient=Gradient("sequence_concat_grad", ("X", "XLengths"), ("X",)))  # fmt: skip
def sequence_concat(attrs: Attributes, xs: list[Array], lengths: list[Array]) -> Value:
    """Joins the first sequences of its inputs, then the second ones, and so on.

    Raises:
        ValueError: an input has no sequences.
    """
    if len(lengths) != len(xs):
        raise ValueError("not all of its inputs have sequences: some lengths are not known")
    rows = sum(len(x) for x in xs) + attrs["spare_rows"]
    total = sum(lengths[1:], start=lengths[0])
    begin = starts_of(total)
    made = jnp.zeros((rows, *xs[0].shape[1:]), xs[0].dtype)
    for x, own in zip(xs, lengths, strict=True):
        owners = owners_of(len(x), own)
        at = jnp.clip(owners, 0, len(own) - 1)
        place = begin[at] + jnp.arange(len(x)) - starts_of(own)[at]
        made = made.at[jnp.where(owners < len(own), place, rows)].set(x, mode="drop")
        begin = begin + own
    return made, total


@fluid_op("sequence_slice", inputs="X Offset Length XLengths?", outputs="Out OutLengths?",
          attrs={"spare_rows": 0},
          gradient=Gradient("sequence_slice_grad", ("X", "Offset", "Length", "XLengths"),
                            ("X",)))  # fmt: skip
def sequence_slice(
    attrs: Attributes, x: Array, offset: Array, length: Array, lengths: Array | None
) -> Value:
    """Takes some rows of each sequence, from an offset on; NaN where it has not so many.

    Raises:
        ValueError: the input has no sequences.
    """
    if lengths is None:
        raise ValueError("its input has no sequences: their lengths are not known")
    first, own = (n.reshape(-1).astype(jnp.int32) for n in (offset, length))
    rows = len(x) + attrs["spare_rows"]
    owners = owners_of(rows, own)
    at = jnp.clip(owners, 0, len(own) - 1)
    place = (starts_of(lengths) + first)[at] + jnp.arange(rows) - starts_of(own)[at]
    made = _taken(x, place, owners < len(own))
    return _unless((first < 0) | (own < 0) | (first + own > lengths), made), own


@fluid_op("sequence_reshape", inputs="X XLengths?", outputs="Out OutLengths?",
          attrs={"new_dim": 1, "spare_rows": 0},
          gradient=Gradient("sequence_reshape_grad", ("X", "XLengths"), ("X",)))  # fmt: skip
def sequence_reshape(attrs: Attributes, x: Array, lengths: Array | None) -> Value:
    """Makes rows of another width of the elements of each sequence.

    Raises:
        ValueError: the input has no sequences.
    """
    if lengths is None:
        raise ValueError("its input has no sequences: their lengths are not known")
    wide, new = x.shape[1], attrs["new_dim"]
    rows = x.size // new
    made = x.reshape(-1)[: rows * new].reshape(rows, new)
    more = jnp.zeros((attrs["spare_rows"], new), x.dtype)
    made = jnp.concatenate([made, more]) if len(more) else made
    return _unless(lengths * wide % new != 0, made), lengths * wide // new


@fluid_op("sequence_erase", inputs="X XLengths?", outputs="Out OutLengths?",
          attrs={"tokens": [], "spare_rows": 0})  # fmt: skip
def sequence_erase(attrs: Attributes, x: Array, lengths: Array | None) -> Value:
    """Leaves some numbers out of each sequence: i64[rows,1] -> i64[rows,1], fewer in each."""
    owners = owners_of(len(x), lengths)
    assert lengths is not None
    tokens = jnp.asarray(attrs["tokens"], x.dtype)
    is_kept = (x.reshape(-1, 1) != tokens).all(1) & (owners < len(lengths))
    own = jnp.zeros(len(lengths), jnp.int32).at[owners].add(is_kept, mode="drop")
    rows = len(x) + attrs["spare_rows"]
    place = jnp.where(is_kept, jnp.cumsum(is_kept) - 1, rows)
    return jnp.zeros((rows, *x.shape[1:]), x.dtype).at[place].set(x, mode="drop"), own


for _type in ("sequence_pad", "sequence_unpad", "sequence_concat", "sequence_slice",
              "sequence_reshape"):  # fmt: skip
    define_gradient(_type)
