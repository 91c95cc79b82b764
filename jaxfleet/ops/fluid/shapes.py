"""Operators that reshape, transpose, split and join arrays."""

import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.schema import Attributes, BySlot, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array


def _shape_back(_: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    return {"X": grads["Out"].reshape(reads["XShape"].shape[1:])}


_SHAPED = ("XShape",)


def shape_record(x: Array) -> Array:
    """An empty array that carries a shape, for the gradient operator."""
    return jnp.zeros((0, *x.shape), x.dtype)


@fluid_op("reshape2", inputs="X", outputs="Out XShape", attrs={"shape": []},
          gradient=Gradient("reshape2_grad", _SHAPED, ("X",), _shape_back))  # fmt: skip
def reshape2(attrs: Attributes, x: Array) -> Value:
    """Changes the shape; 0 keeps an axis, -1 is inferred."""
    shape = [x.shape[at] if size == 0 else size for at, size in enumerate(attrs["shape"])]
    return jnp.reshape(x, shape), shape_record(x)


@fluid_op("unsqueeze2", inputs="X", outputs="Out XShape", attrs={"axes": []},
          gradient=Gradient("unsqueeze2_grad", _SHAPED, ("X",), _shape_back))  # fmt: skip
def unsqueeze2(attrs: Attributes, x: Array) -> Value:
    """Inserts axes of size 1."""
    return jnp.expand_dims(x, tuple(attrs["axes"])), shape_record(x)


@fluid_op("squeeze2", inputs="X", outputs="Out XShape", attrs={"axes": []},
          gradient=Gradient("squeeze2_grad", _SHAPED, ("X",), _shape_back))  # fmt: skip
def squeeze2(attrs: Attributes, x: Array) -> Value:
    """Removes axes of size 1."""
    return jnp.squeeze(x, tuple(attrs["axes"]) or None), shape_record(x)


def _transpose_back(attrs: Attributes, _: BySlot, grads: BySlot) -> BySlot:
    return {"X": jnp.transpose(grads["Out"], np.argsort(attrs["axis"]).tolist())}


@fluid_op("transpose2", inputs="X", outputs="Out XShape", attrs={"axis": []},
          gradient=Gradient("transpose2_grad", _SHAPED, ("X",), _transpose_back))  # fmt: skip
def transpose2(attrs: Attributes, x: Array) -> Value:
    """Permutes the axes."""
    return jnp.transpose(x, attrs["axis"]), shape_record(x)


@fluid_op("split", inputs="X", outputs="Out*", attrs={"num": 0, "sections": [], "axis": 0},
          gradient=Gradient("concat", (), ("X",),
                            by=lambda attrs: {"axis": attrs["axis"]}))  # fmt: skip
def split(attrs: Attributes, x: Array) -> Value:
    """Splits along an axis, into `num` parts or `sections` rows each."""
    if attrs["num"]:
        return jnp.split(x, attrs["num"], axis=attrs["axis"])
    return jnp.split(x, np.cumsum(attrs["sections"])[:-1], axis=attrs["axis"])


@fluid_op("flatten2", inputs="X", outputs="Out XShape", attrs={"axis": 1},
          gradient=Gradient("flatten2_grad", _SHAPED, ("X",), _shape_back))  # fmt: skip
def flatten2(attrs: Attributes, x: Array) -> Value:
    """Flattens to a matrix whose rows are the axes before `axis`."""
    rows = int(np.prod(x.shape[: attrs["axis"]], dtype=np.int64))
    columns = int(np.prod(x.shape[attrs["axis"] :], dtype=np.int64))
    return jnp.reshape(x, (rows, columns)), shape_record(x)


def _stack_back(attrs: Attributes, _: BySlot, grads: BySlot) -> BySlot:
    return {"X": list(jnp.moveaxis(grads["Y"], attrs["axis"], 0))}


@fluid_op("stack", inputs="X*", outputs="Y", attrs={"axis": 0},
          gradient=Gradient("stack_grad", (), ("X",), _stack_back))  # fmt: skip
def stack(attrs: Attributes, xs: list[Array]) -> Array:
    """Stacks along a new axis."""
    return jnp.stack(xs, axis=attrs["axis"])


def _unstack_back(attrs: Attributes, _: BySlot, grads: BySlot) -> BySlot:
    return {"X": jnp.stack(grads["Y"], axis=attrs["axis"])}


@fluid_op("unstack", inputs="X", outputs="Y*", attrs={"axis": 0, "num": 0},
          gradient=Gradient("unstack_grad", (), ("X",), _unstack_back))  # fmt: skip
def unstack(attrs: Attributes, x: Array) -> Value:
    """Splits an axis into arrays without it."""
    return list(jnp.moveaxis(x, attrs["axis"], 0))


@fluid_op("expand", inputs="X", attrs={"expand_times": []}, gradient="X -> X")
def expand(attrs: Attributes, x: Array) -> Array:
    """Tiles an array along its axes."""
    return jnp.tile(x, attrs["expand_times"])


def _pad_back(attrs: Attributes, _: BySlot, grads: BySlot) -> BySlot:
    grad, paddings = grads["Out"], attrs["paddings"]
    pairs = zip(paddings[::2], paddings[1::2], grad.shape, strict=True)
    return {"X": grad[tuple(slice(before, size - after) for before, after, size in pairs)]}


@fluid_op("pad", inputs="X", attrs={"paddings": [], "pad_value": 0.0},
          gradient=Gradient("pad_grad", (), ("X",), _pad_back))  # fmt: skip
def pad(attrs: Attributes, x: Array) -> Array:
    """Pads with a value: a pair of `paddings` per axis."""
    pairs = list(zip(attrs["paddings"][::2], attrs["paddings"][1::2], strict=True))
    return jnp.pad(x, pairs, constant_values=attrs["pad_value"])


@fluid_op("reverse", inputs="X", attrs={"axis": [0]},
          gradient=Gradient("reverse", (), ("X",), by=dict))  # fmt: skip
def reverse(attrs: Attributes, x: Array) -> Array:
    """Reverses the order along axes."""
    return jnp.flip(x, tuple(attrs["axis"]))
