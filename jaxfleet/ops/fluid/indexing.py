"""Lookup, gather, scatter, slicing, sorting and one-hot operators."""

import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.schema import Attributes, BySlot, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array

_OF_A_TABLE = {"is_sparse": False, "is_distributed": False, "padding_idx": -1,
               "remote_prefetch": False, "trainer_id": 0, "slot": 0, "height_sections": [],
               "epmap": [], "table_names": []}  # fmt: skip


@fluid_op("lookup_table_v2", inputs="W Ids", attrs=_OF_A_TABLE, gradient="W Ids -> W")
def lookup_table_v2(attrs: Attributes, table: Array, ids: Array) -> Array:
    """Looks up rows of a table; those of `padding_idx` are zero."""
    rows = _rows(table, ids)
    if attrs["padding_idx"] < 0:
        return rows
    return jnp.where((ids == attrs["padding_idx"])[..., None], 0, rows)


def _rows(x: Array, numbers: Array) -> Array:
    """Selects rows by number.

    A row out of range is NaN: fluid raises, a device cannot, and another row in its place would be
    trained. Integers have no NaN; for them it is the nearest row.
    """
    made = jnp.take(x, numbers, axis=0, mode="clip")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return made
    last = min(x.shape[0] - 1, np.iinfo(np.dtype(numbers.dtype)).max)
    is_there = (numbers >= 0) & (numbers <= last)
    return jnp.where(is_there.reshape(*numbers.shape, *[1] * (x.ndim - 1)), made, jnp.nan)


@fluid_op("lookup_table", inputs="W Ids", attrs=_OF_A_TABLE, gradient="W Ids -> W")
def lookup_table(attrs: Attributes, table: Array, ids: Array) -> Array:
    """Looks up rows by numbers whose last axis, of size 1, becomes the row."""
    if ids.shape[-1] != 1:
        raise ValueError(f"the last size of its ids is 1, not {ids.shape[-1]}")
    return lookup_table_v2(attrs, table, ids[..., 0])


def _one_hot(attrs: Attributes, x: Array) -> Array:
    depth = attrs["depth"]
    made = (x[..., None] == jnp.arange(depth)).astype(jnp.float32)
    if attrs["allow_out_of_range"]:
        return made
    is_named = (x >= 0) & (x < depth)  # out of range fluid raises, a device cannot
    return jnp.where(is_named[..., None], made, jnp.nan)


_DEPTH = {"depth": 1, "dtype": "float32", "allow_out_of_range": False}


@fluid_op("one_hot_v2", inputs="X", attrs=_DEPTH)
def one_hot_v2(attrs: Attributes, x: Array) -> Array:
    """One-hot rows."""
    return _one_hot(attrs, x)


@fluid_op("one_hot", inputs="X", attrs=_DEPTH)
def one_hot(attrs: Attributes, x: Array) -> Array:
    """One-hot rows of numbers whose last axis, of size 1, becomes the row."""
    if x.shape[-1] != 1:
        raise ValueError(f"the last size of its input is 1, not {x.shape[-1]}")
    return _one_hot(attrs, x[..., 0])


@fluid_op("top_k", inputs="X", outputs="Out Indices", attrs={"k": 1}, gradient="X Indices -> X")
def top_k(attrs: Attributes, x: Array) -> Value:
    """The `k` largest elements along the last axis, and their indices."""
    order = jnp.argsort(-x, axis=-1)[..., : attrs["k"]]
    return jnp.take_along_axis(x, order, axis=-1), order.astype(jnp.int32)


_WHICH = {"axis": -1, "keepdims": False, "dtype": "int64"}


@fluid_op("arg_max", inputs="X", attrs=_WHICH)
def arg_max(attrs: Attributes, x: Array) -> Array:
    """Index of the largest element along an axis."""
    return jnp.argmax(x, attrs["axis"], keepdims=attrs["keepdims"]).astype(jnp.int32)


@fluid_op("arg_min", inputs="X", attrs=_WHICH)
def arg_min(attrs: Attributes, x: Array) -> Array:
    """Index of the smallest element along an axis."""
    return jnp.argmin(x, attrs["axis"], keepdims=attrs["keepdims"]).astype(jnp.int32)


@fluid_op("argsort", inputs="X", outputs="Out Indices", attrs={"axis": -1, "descending": False},
          gradient="X Indices -> X")  # fmt: skip
def argsort(attrs: Attributes, x: Array) -> Value:
    """Sorts along an axis; returns also the indices."""
    order = jnp.argsort(-x if attrs["descending"] else x, axis=attrs["axis"])
    return jnp.take_along_axis(x, order, axis=attrs["axis"]), order.astype(jnp.int32)


def _gather_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    """Sums the gradients of rows selected twice; with `overwrite` the last one counts."""
    x, rows, grad = reads["X"], reads["Index"].reshape(-1), grads["Out"]
    rows = jnp.where(rows < 0, x.shape[0], rows)  # out of range, so it is dropped
    if attrs["overwrite"]:
        places = jnp.arange(rows.size)
        last = jnp.zeros(x.shape[0], places.dtype).at[rows].max(places, mode="drop")
        is_last = (jnp.take(last, rows, mode="clip") == places).reshape(
            -1, *(1 for _ in x.shape[1:])
        )
        grad = jnp.where(is_last, grad, 0)
    return {"X": jnp.zeros_like(x).at[rows].add(grad, mode="drop")}


@fluid_op("gather", inputs="X Index", attrs={"overwrite": True},
          gradient=Gradient("gather_grad", ("X", "Index"), ("X",), _gather_back))  # fmt: skip
def gather(_: Attributes, x: Array, index: Array) -> Array:
    """Selects rows."""
    return _rows(x, index.reshape(-1))


@fluid_op("gather_nd", inputs="X Index", gradient="X Index -> X")
def gather_nd(_: Attributes, x: Array, index: Array) -> Array:
    """Selects elements or slices by the index tuples along the last axis."""
    return x[tuple(jnp.moveaxis(index, -1, 0))]


@fluid_op("scatter", inputs="X Ids Updates", attrs={"overwrite": True},
          gradient="X Ids Updates -> X Updates")  # fmt: skip
def scatter(attrs: Attributes, x: Array, ids: Array, updates: Array) -> Array:
    """Overwrites rows, or adds to them; updates of the same row are summed."""
    rows = ids.reshape(-1)
    return (
        x.at[rows].set(updates) if attrs["overwrite"] else x.at[rows].set(0).at[rows].add(updates)
    )


@fluid_op("slice", inputs="Input",
          attrs={"axes": [], "starts": [], "ends": [], "decrease_axis": [], "infer_flags": []},
          gradient="Input -> Input")  # fmt: skip
def slice_(attrs: Attributes, x: Array) -> Array:
    """Slices along axes, and removes the axes of `decrease_axis`."""
    part = [slice(None)] * x.ndim
    for axis, start, end in zip(attrs["axes"], attrs["starts"], attrs["ends"], strict=True):
        part[axis] = slice(start, end)
    made = x[tuple(part)]
    made = jnp.squeeze(made, tuple(attrs["decrease_axis"])) if attrs["decrease_axis"] else made
    return made if made.ndim else made.reshape(1)


@fluid_op("strided_slice", inputs="Input",
          attrs={"axes": [], "starts": [], "ends": [], "strides": [], "infer_flags": []},
          gradient="Input -> Input")  # fmt: skip
def strided_slice(attrs: Attributes, x: Array) -> Array:
    """Slices along axes, with strides."""
    part = [slice(None)] * x.ndim
    bounds = (attrs[name] for name in ("axes", "starts", "ends", "strides"))
    for axis, *bound in zip(*bounds, strict=True):
        part[axis] = slice(*bound)
    return x[tuple(part)]
