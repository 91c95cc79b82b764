"""Operators that make images and volumes larger or smaller, as fluid 1.8.5's kernels compute it.

Along each axis an element of the result is one of the image, or lies between two. Where it lies is
worked out in the 32 bits of the original, since one bit may move it to the next element.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, fluid_op
from jaxfleet.ops.registry import Array

Along: TypeAlias = Callable[[Attributes, Array, int, int], Array]

_OUT = ("out_d", "out_h", "out_w")
_ATTRS = {**dict.fromkeys(_OUT, -1), "scale": 0.0, "interp_method": "bilinear",
          "align_corners": True, "align_mode": 1, "data_layout": "NCHW"}  # fmt: skip


@fluid_op("bilinear_interp", inputs="X", attrs=_ATTRS,
          gradient=Gradient("bilinear_interp_grad", ("X",), ("X",)))  # fmt: skip
def bilinear_interp(attrs: Attributes, x: Array) -> Array:
    """Resizes images; each element lies between four."""
    return _resized(attrs, x, _between)


@fluid_op("trilinear_interp", inputs="X", attrs={**_ATTRS, "interp_method": "trilinear"},
          gradient=Gradient("trilinear_interp_grad", ("X",), ("X",)))  # fmt: skip
def trilinear_interp(attrs: Attributes, x: Array) -> Array:
    """Resizes volumes; each element lies between eight."""
    return _resized(attrs, x, _between)


@fluid_op("nearest_interp", inputs="X", attrs={**_ATTRS, "interp_method": "nearest"},
          gradient=Gradient("nearest_interp_grad", ("X",), ("X",)))  # fmt: skip
def nearest_interp(attrs: Attributes, x: Array) -> Array:
    """Resizes images; each element is the one that is nearest."""
    return _resized(attrs, x, _nearest)


def _resized(attrs: Attributes, x: Array, along: Along) -> Array:
    first = 1 if attrs["data_layout"] == "NHWC" else 2
    axes = range(first, first + x.ndim - 2)
    wanted = _sizes(attrs, [x.shape[axis] for axis in axes])
    for axis, size in zip(axes, wanted, strict=True):
        if size != x.shape[axis]:
            x = along(attrs, x, axis, size)
    return x


def _sizes(attrs: Attributes, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes of the result.

    Raises:
        ValueError: an axis of it would have none.
    """
    if attrs["scale"] > 0:
        made = [int(np.float32(size) * np.float32(attrs["scale"])) for size in sizes]
    else:
        made = [attrs[name] for name in _OUT[-len(sizes) :]]
    if min(made) <= 0:
        raise ValueError(f"images of {list(sizes)} would be resized to {made}")
    return made


def _ratio(attrs: Attributes, size: int, wanted: int) -> np.float32:
    """Returns how far elements of the result are from one another in the image."""
    if wanted <= 1:
        return np.float32(0)
    if attrs["align_corners"]:
        return np.float32(size - 1) / np.float32(wanted - 1)
    return np.float32(size) / np.float32(wanted)


def _nearest(attrs: Attributes, x: Array, axis: int, wanted: int) -> Array:
    places = _ratio(attrs, x.shape[axis], wanted) * np.arange(wanted, dtype=np.float32)
    rounded = (places.astype(np.float64) + 0.5) if attrs["align_corners"] else places
    return jnp.take(x, rounded.astype(np.int32), axis=axis)


def _between(attrs: Attributes, x: Array, axis: int, wanted: int) -> Array:
    size, at = x.shape[axis], np.arange(wanted, dtype=np.float32)
    ratio = _ratio(attrs, size, wanted)
    if attrs["align_mode"] == 0 and not attrs["align_corners"]:
        places = np.maximum(ratio * (at + np.float32(0.5)) - np.float32(0.5), 0)
    else:
        places = ratio * at
    low = places.astype(np.int32)
    high = np.minimum(low + 1, size - 1)
    share = (places - low).reshape(-1, *[1] * (x.ndim - axis - 1)).astype(x.dtype)
    return jnp.take(x, low, axis=axis) * (1 - share) + jnp.take(x, high, axis=axis) * share


for _type in ("bilinear_interp", "trilinear_interp", "nearest_interp"):
    define_gradient(_type)
