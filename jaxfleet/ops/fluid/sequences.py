"""Operators on sequences of unequal lengths, whose rows are stored consecutively.

`XLengths`, `XPlaces`, `XRoom` and `OutLengths` are slots that fluid lacks, since its arrays carry
their lengths: the lengths of sequences, `i32[sequences]`, and arrays whose size is that of the
longest sequence (`jaxfleet.fluid.framework.sequence_lengths`). Rows beyond the sum of the lengths
are unused: they belong to no sequence and change no result. Operators whose output lengths are
known only at run time return unused rows, which are zero.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array


def owners_of(rows: int, lengths: Array | None) -> Array:
    """The sequence of each row; the number of sequences for an unused row."""
    if lengths is None:
        raise ValueError("its input has no sequences: their lengths are not known")
    return jnp.searchsorted(jnp.cumsum(lengths), jnp.arange(rows), side="right")


def starts_of(lengths: Array) -> Array:
    """The first row of each sequence."""
    return jnp.cumsum(lengths) - lengths


def levels_apart(levels: Array, rows: int) -> tuple[Array, Array]:
    """The number of prefixes of each source, and of rows of each prefix."""
    return levels[: len(levels) - rows], levels[len(levels) - rows :]


def rows_of_sources(prefixes: Array, lengths: Array) -> Array:
    """The number of rows of each source, over all its prefixes."""
    before = jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths)])
    ends = jnp.take(before, jnp.cumsum(prefixes), mode="clip")
    return jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))


def _beside(x: Array, numbers: Array) -> Array:
    """Reshapes one number per row for broadcasting against the rows."""
    return numbers.reshape(-1, *[1] * (x.ndim - 1))


@fluid_op("sequence_pool", inputs="X XLengths?", outputs="Out MaxIndex",
          attrs={"pooltype": "AVERAGE", "is_test": False, "pad_value": 0.0},
          gradient=Gradient("sequence_pool_grad", ("X", "XLengths", "MaxIndex"), ("X",),
                            only_if={"MaxIndex": ("pooltype", "MAX")}))  # fmt: skip
def sequence_pool(attrs: Attributes, x: Array, lengths: Array | None) -> Value:
    """Pools each sequence to one row; an empty one is `pad_value`."""
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
    """The first row with the largest element, for each sequence and column."""
    largest = jax.ops.segment_max(jax.lax.stop_gradient(x), owners, count)
    known = jnp.take(largest, owners, axis=0, mode="clip")
    rows = _beside(x, jnp.arange(x.shape[0]))
    candidates = jnp.where(x == known, rows, x.shape[0])
    first = jax.ops.segment_min(candidates, owners, count)
    return jnp.clip(first, 0, x.shape[0] - 1).astype(jnp.int32)


@fluid_op("sequence_softmax", inputs="X XLengths?", attrs={"use_cudnn": False},
          gradient="X XLengths Out -> X")  # fmt: skip
def sequence_softmax(_: Attributes, x: Array, lengths: Array | None) -> Array:
    """Softmax over the elements of each sequence."""
    owners = owners_of(x.shape[0], lengths)
    assert lengths is not None
    count = lengths.shape[0] + 1  # unused rows form one more sequence
    largest = jax.ops.segment_max(jax.lax.stop_gradient(x), owners, count)
    grown = jnp.exp(x - largest[owners])
    return grown / jax.ops.segment_sum(grown, owners, count)[owners]


@fluid_op("sequence_expand", inputs="X Y YLengths? YLevels?", attrs={"ref_level": -1},
          gradient="X Y YLengths YLevels -> X")  # fmt: skip
def sequence_expand(
    attrs: Attributes, x: Array, y: Array, lengths: Array | None, levels: Array | None
) -> Array:
    """Repeats each row by the length of the sequence of the same number.

    Of two levels, 0 has a row per source, and the last one has a row per prefix.
    """
    if levels is not None:
        prefixes, own = levels_apart(levels, len(y))
        lengths = rows_of_sources(prefixes, own) if attrs["ref_level"] == 0 else own
    return jnp.take(x, owners_of(y.shape[0], lengths), axis=0, mode="clip")


@fluid_op("lod_reset", inputs="X Y YLengths?", gradient="X Y YLengths -> X")
def lod_reset(_: Attributes, x: Array, y: Array, lengths: Array | None) -> Array:
    """Divides rows into the sequences of `Y`, with as many rows as `Y`, unused ones included.

    An input with fewer rows than these sequences gives NaN, where fluid raises an error.
    """
    more = jnp.zeros((max(len(y) - len(x), 0), *x.shape[1:]), x.dtype)
    made = jnp.concatenate([x[: len(y)], more])
    if lengths is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return made
    return jnp.where(lengths.sum() > len(x), jnp.nan, made)


@fluid_op("sequence_conv", inputs="X Filter XLengths?",
          attrs={"contextLength": 3, "contextStart": -1, "contextStride": 1,
                 "paddingTrainable": False},
          gradient="X Filter XLengths -> X Filter")  # fmt: skip
def sequence_conv(attrs: Attributes, x: Array, filters: Array, lengths: Array | None) -> Array:
    """Multiplies the context of each row in its sequence by a matrix; zero beyond the ends."""
    rows = jnp.arange(x.shape[0])
    owners = owners_of(x.shape[0], lengths)
    around = []
    for at in range(attrs["contextLength"]):
        places = rows + attrs["contextStart"] + at
        inside = jnp.clip(places, 0, x.shape[0] - 1)
        is_same = (places == inside) & (owners[inside] == owners)
        around.append(jnp.where(is_same[:, None], x[inside], 0))
    return jnp.concatenate(around, axis=1) @ filters


def padded(x: Array, lengths: Array | None, most: int, fill: Any = 0) -> Array:
    """Pads sequences to an array `[b,most,...]`."""
    if lengths is None:
        raise ValueError("its input has no sequences: their lengths are not known")
    places = starts_of(lengths)[:, None] + jnp.arange(most)
    is_there = jnp.arange(most) < lengths[:, None]
    rows = jnp.take(x, places, axis=0, mode="clip")
    return jnp.where(is_there.reshape(*is_there.shape, *[1] * (x.ndim - 1)), rows, fill)


def _taken(x: Array, rows: Array, is_there: Array) -> Array:
    """Rows by number, zeros for missing ones."""
    made = jnp.take(x, rows, axis=0, mode="clip")
    return jnp.where(is_there.reshape(-1, *[1] * (x.ndim - 1)), made, 0)


def _unless(is_wrong: Array, x: Array) -> Array:
    """Replaces an array by NaN if a condition marks the request as invalid."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(is_wrong.any(), jnp.nan, x)


@fluid_op("sequence_pad", inputs="X PadValue XLengths? XPlaces?", outputs="Out Length",
          attrs={"padded_length": -1},
          gradient="X PadValue XLengths XPlaces -> X")  # fmt: skip
def sequence_pad(
    attrs: Attributes, x: Array, fill: Array, lengths: Array | None, places: Array | None
) -> Value:
    """Pads sequences: `[rows,...]` -> `[b,longest,...]`."""
    most = attrs["padded_length"]
    if most < 0:
        if places is None:
            raise ValueError("the length of its longest sequence is unknown")
        most = len(places)
    made = padded(x, lengths, most, fill.astype(x.dtype))
    assert lengths is not None
    return _unless(lengths > most, made), lengths


@fluid_op("sequence_unpad", inputs="X Length Like?", outputs="Out OutLengths?",
          attrs={"spare_rows": 0},
          gradient="X Length Like -> X")  # fmt: skip
def sequence_unpad(attrs: Attributes, x: Array, length: Array, like: Array | None) -> Value:
    """Removes padding: `[b,most,...]` -> `[rows,...]`.

    `Like` is ours: a variable with as many rows, if one is known.
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
          gradient="X XLengths -> X")  # fmt: skip
def sequence_concat(attrs: Attributes, xs: list[Array], lengths: list[Array]) -> Value:
    """Joins the first sequences of its inputs, then the second ones, and so on."""
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
          gradient="X Offset Length XLengths -> X")  # fmt: skip
def sequence_slice(
    attrs: Attributes, x: Array, offset: Array, length: Array, lengths: Array | None
) -> Value:
    """Slices each sequence; NaN for one that is too short."""
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
          gradient="X XLengths -> X")  # fmt: skip
def sequence_reshape(attrs: Attributes, x: Array, lengths: Array | None) -> Value:
    """Reshapes the elements of each sequence to rows of another width."""
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
    """Removes some numbers from each sequence: i64[rows,1] -> i64[rows,1], with unused rows."""
    owners = owners_of(len(x), lengths)
    assert lengths is not None
    tokens = jnp.asarray(attrs["tokens"], x.dtype)
    is_kept = (x.reshape(-1, 1) != tokens).all(1) & (owners < len(lengths))
    own = jnp.zeros(len(lengths), jnp.int32).at[owners].add(is_kept, mode="drop")
    rows = len(x) + attrs["spare_rows"]
    place = jnp.where(is_kept, jnp.cumsum(is_kept) - 1, rows)
    return jnp.zeros((rows, *x.shape[1:]), x.dtype).at[place].set(x, mode="drop"), own
