"""Convolution, pooling and resizing of images and volumes, as fluid 1.8.5's kernels compute them.

Images are `NCHW` or `NHWC`, filters `[out channels, in channels of a group, height, width]` with
both. Paddings are two numbers, which apply to both sides, or four: top, bottom, left, right.

Resizing: along each axis an element of the result is an element of the input or lies between two.
Its position is computed in 32 bits as in fluid, since one bit may move it to the next element.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfleet.ops.fluid.schema import Attributes, fluid_op
from jaxfleet.ops.registry import Array

Pairs: TypeAlias = list[tuple[int, int]]  # padding before and after, per spatial axis

_CONV = {"strides": [1, 1], "paddings": [0, 0], "padding_algorithm": "EXPLICIT",
         "dilations": [1, 1], "groups": 1, "use_cudnn": False, "use_mkldnn": False,
         "fuse_relu_before_depthwise_conv": False, "data_format": "NCHW"}  # fmt: skip
_CONV3 = {**_CONV, "strides": [1, 1, 1], "paddings": [0, 0, 0], "dilations": [1, 1, 1],
          "data_format": "NCDHW"}  # fmt: skip
_POOL = {"pooling_type": "max", "ksize": [1, 1], "global_pooling": False, "strides": [1, 1],
         "paddings": [0, 0], "padding_algorithm": "EXPLICIT", "exclusive": True,
         "adaptive": False, "ceil_mode": False, "use_cudnn": False, "use_mkldnn": False,
         "data_format": "NCHW"}  # fmt: skip
_POOL3 = {**_POOL, "ksize": [1, 1, 1], "strides": [1, 1, 1], "paddings": [0, 0, 0],
          "data_format": "NCDHW"}  # fmt: skip


def _pairs(attrs: Attributes, sizes: Sequence[int], window: Sequence[int]) -> Pairs:
    """The padding of each axis by the attributes."""
    match attrs["padding_algorithm"]:
        case "VALID":
            return [(0, 0)] * len(sizes)
        case "SAME":
            return [
                _same(size, wide, step)
                for size, wide, step in zip(sizes, window, attrs["strides"], strict=True)
            ]
    given = attrs["paddings"]
    if len(given) == len(sizes):
        return [(both, both) for both in given]
    return list(zip(given[::2], given[1::2], strict=True))


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
    """The padding for `size / stride` windows, rounded up."""
    more = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
    return more // 2, more - more // 2


def _is_last(attrs: Attributes) -> bool:
    return attrs["data_format"] in {"NHWC", "NDHWC"}


def _axes(attrs: Attributes, x: Array) -> slice:
    return slice(1, x.ndim - 1) if _is_last(attrs) else slice(2, None)


def _convolve(attrs: Attributes, x: Array, filters: Array, groups: int) -> Array:
    layout, axes = attrs["data_format"], _axes(attrs, x)
    sizes = x.shape[axes]
    is_same = attrs["padding_algorithm"] == "SAME"  # which ignores dilation
    dilations = [1] * len(sizes) if is_same else attrs["dilations"]
    made = lax.conv_general_dilated(
        x,
        filters,
        attrs["strides"],
        _pairs(attrs, sizes, filters.shape[2:]),
        rhs_dilation=dilations,
        dimension_numbers=(layout, "OIDHW" if x.ndim == 5 else "OIHW", layout),
        feature_group_count=groups,
    )
    window = [(size - 1) * by + 1 for size, by in zip(filters.shape[2:], dilations, strict=True)]
    return _not_empty(made, sizes, window, made.shape[axes])


def _not_empty(
    made: Array, sizes: Sequence[int], window: Sequence[int], found: Sequence[int]
) -> Array:
    """The result of windows; ValueError if none fits, since a mean over none would be NaN."""
    if all(size > 0 for size in found):
        return made
    wide, images = ("x".join(map(str, shape)) for shape in (window, sizes))
    raise ValueError(f"a window of {wide} does not fit into images of {images} and their padding")


@fluid_op("conv3d", inputs="Input Filter Bias?", outputs="Output", attrs=_CONV3,
          gradient="Input Filter Bias -> Input Filter Bias")  # fmt: skip
def conv3d(attrs: Attributes, x: Array, filters: Array, bias: Array | None) -> Array:
    """Convolves volumes."""
    return conv2d(attrs, x, filters, bias)


@fluid_op("conv2d", inputs="Input Filter Bias?", outputs="Output", attrs=_CONV,
          gradient="Input Filter Bias -> Input Filter Bias")  # fmt: skip
def conv2d(attrs: Attributes, x: Array, filters: Array, bias: Array | None) -> Array:
    """Convolves images."""
    made = _convolve(attrs, x, filters, attrs["groups"])
    if bias is None:
        return made
    return made + (bias if _is_last(attrs) else bias.reshape(-1, *[1] * (x.ndim - 2)))


@fluid_op("depthwise_conv2d", inputs="Input Filter", outputs="Output", attrs=_CONV,
          gradient="Input Filter -> Input Filter")  # fmt: skip
def depthwise_conv2d(attrs: Attributes, x: Array, filters: Array) -> Array:
    """Convolves each channel separately."""
    return _convolve(attrs, x, filters, attrs["groups"])


@fluid_op("conv2d_transpose", inputs="Input Filter", outputs="Output",
          attrs={**_CONV, "output_size": []},
          gradient="Input Filter -> Input Filter")  # fmt: skip
def conv2d_transpose(attrs: Attributes, x: Array, filters: Array) -> Array:
    """Transposed convolution; filters are `[in, out of a group, h, w]`."""
    x = jnp.moveaxis(x, 3, 1) if _is_last(attrs) else x
    groups, window = attrs["groups"], filters.shape[2:]
    by_group = filters.reshape(groups, -1, *filters.shape[1:]).swapaxes(1, 2)
    turned = jnp.flip(by_group.reshape(-1, by_group.shape[2], *window), (2, 3))
    made = lax.conv_general_dilated(
        x,
        turned,
        [1, 1],
        _ends(attrs, x.shape[2:], window),
        lhs_dilation=attrs["strides"],
        rhs_dilation=attrs["dilations"],
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
    )
    made = _not_empty(made, x.shape[2:], window, made.shape[2:])
    return jnp.moveaxis(made, 1, 3) if _is_last(attrs) else made


def _ends(attrs: Attributes, sizes: Sequence[int], window: Sequence[int]) -> Pairs:
    """Padding of the image for convolution with the flipped filters."""
    wide = [(size - 1) * by for size, by in zip(window, attrs["dilations"], strict=True)]
    pairs = _pairs(attrs, sizes, window)
    ends = [(edge - low, edge - high) for edge, (low, high) in zip(wide, pairs, strict=True)]
    if not attrs["output_size"]:
        return ends
    usual = [
        (size - 1) * step + 1 + low + high - edge
        for size, step, (low, high), edge in zip(sizes, attrs["strides"], ends, wide, strict=True)
    ]
    more = [size - made for size, made in zip(attrs["output_size"], usual, strict=True)]
    return [(low, high + extra) for (low, high), extra in zip(ends, more, strict=True)]


@fluid_op("pool2d", inputs="X", attrs=_POOL, gradient="X Out -> X")
def pool2d(attrs: Attributes, x: Array) -> Array:
    """Maximum or average of each window."""
    x = jnp.moveaxis(x, -1, 1) if _is_last(attrs) else x
    made = _adaptive(attrs, x) if attrs["adaptive"] else _pooled(attrs, x)
    made = _not_empty(made, x.shape[2:], attrs["ksize"], made.shape[2:])
    return jnp.moveaxis(made, 1, -1) if _is_last(attrs) else made


@fluid_op("pool3d", inputs="X", attrs=_POOL3, gradient="X Out -> X")
def pool3d(attrs: Attributes, x: Array) -> Array:
    """Maximum or average of each window of volumes."""
    return pool2d(attrs, x)


def _pooled(attrs: Attributes, x: Array) -> Array:
    sizes, window = x.shape[2:], tuple(attrs["ksize"])
    pairs = _pairs(attrs, sizes, window)
    if attrs["global_pooling"]:
        window, pairs = sizes, [(0, 0)] * len(sizes)
    strides = tuple(attrs["strides"])
    if attrs["ceil_mode"]:
        pairs = [
            (low, high + -(size + low + high - wide) % step)
            for (low, high), size, wide, step in zip(pairs, sizes, window, strides, strict=True)
        ]
    over = ((1, 1, *window), (1, 1, *strides), [(0, 0), (0, 0), *pairs])
    if attrs["pooling_type"] == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, *over)
    total = lax.reduce_window(x, 0.0, lax.add, *over)
    if not attrs["exclusive"]:
        return total / math.prod(window)
    return total / lax.reduce_window(jnp.ones_like(x[:1, :1]), 0.0, lax.add, *over)


def _adaptive(attrs: Attributes, x: Array) -> Array:
    """Pools into `ksize` windows, which overlap if the sizes are not divisible."""
    rows, columns = (
        [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]
        for count, size in zip(attrs["ksize"], x.shape[2:], strict=True)
    )
    take = jnp.max if attrs["pooling_type"] == "max" else jnp.mean
    cells = [jnp.stack([take(x[:, :, a:b, c:d], (2, 3)) for c, d in columns], -1) for a, b in rows]
    return jnp.stack(cells, -2)


Along: TypeAlias = Callable[[Attributes, Array, int, int], Array]

_OUT = ("out_d", "out_h", "out_w")
_ATTRS = {**dict.fromkeys(_OUT, -1), "scale": 0.0, "interp_method": "bilinear",
          "align_corners": True, "align_mode": 1, "data_layout": "NCHW"}  # fmt: skip


@fluid_op("bilinear_interp", inputs="X", attrs=_ATTRS, gradient="X -> X")
def bilinear_interp(attrs: Attributes, x: Array) -> Array:
    """Resizes images by bilinear interpolation."""
    return _resized(attrs, x, _between)


@fluid_op("trilinear_interp", inputs="X", attrs={**_ATTRS, "interp_method": "trilinear"},
          gradient="X -> X")  # fmt: skip
def trilinear_interp(attrs: Attributes, x: Array) -> Array:
    """Resizes volumes by trilinear interpolation."""
    return _resized(attrs, x, _between)


@fluid_op("nearest_interp", inputs="X", attrs={**_ATTRS, "interp_method": "nearest"},
          gradient="X -> X")  # fmt: skip
def nearest_interp(attrs: Attributes, x: Array) -> Array:
    """Resizes images by nearest-neighbor interpolation."""
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
    """The sizes of the result, each of which must be positive."""
    if attrs["scale"] > 0:
        made = [int(np.float32(size) * np.float32(attrs["scale"])) for size in sizes]
    else:
        made = [attrs[name] for name in _OUT[-len(sizes) :]]
    if min(made) <= 0:
        raise ValueError(f"images of {list(sizes)} would be resized to {made}")
    return made


def _ratio(attrs: Attributes, size: int, wanted: int) -> np.float32:
    """Distance of the result's elements in the input."""
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
