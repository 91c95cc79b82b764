"""Convolution, pooling and resizing of images (2d) and volumes (3d).

Images are `NCHW` or `NHWC`, volumes `NCDHW` or `NDHWC`. A size is a number, or one for each spatial
axis; a padding may also be two numbers for each of these (top, bottom, left, right), a pair for
every axis, `"SAME"` or `"VALID"`.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.initializer import Normal
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.param_attr import ParamAttr

Size: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | str | Sequence[Any]

_FORMATS = {2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}  # by the number of spatial axes
_KINDS = {2: ("images", "a number or two", "height and width", "a number, two or four"),
          3: ("volumes", "a number or three", "depth, height and width",
              "a number, three or six")}  # fmt: skip


_P = ParamSpec("_P")


def _over(
    axes: int, name: str, layer: Callable[Concatenate[int, _P], Variable]
) -> Callable[_P, Variable]:
    """Returns a layer for a number of spatial axes, with that number's `data_format` by default."""

    def over(*args: _P.args, **options: _P.kwargs) -> Variable:
        return layer(axes, *args, **options)

    _, *parameters, data_format = inspect.signature(layer).parameters.values()
    parameters.append(data_format.replace(default=_FORMATS[axes][0]))
    shown: Any = over
    shown.__signature__ = inspect.Signature(parameters, return_annotation=Variable)
    over.__name__ = over.__qualname__ = name
    over.__doc__ = layer.__doc__
    return over


def _convolution(
    axes: int,
    input: Variable,
    num_filters: int,
    filter_size: Size,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "",
) -> Variable:
    """Convolves images or volumes with filters, and adds a bias to each channel.

    Raises:
        ProgramError: the groups do not divide the channels, or a padding is invalid.
    """
    layer, data_format = f"conv{axes}d", data_format or _FORMATS[axes][0]
    (x,) = variables(layer, "input", input)
    channels, parts = channels_of(layer, x, data_format, axes), groups or 1
    if channels % parts or num_filters % parts:
        what = f"{layer}: {channels} channels and {num_filters} filters are not {parts} groups"
        raise mistake(what)
    is_depthwise = axes == 2 and parts == channels and not use_cudnn
    helper = LayerHelper(f"depthwise_{layer}" if is_depthwise else layer, name)
    window = sizes_of(layer, "filter_size", filter_size, axes)
    weight = helper.parameter(
        ParamAttr.of(param_attr) or ParamAttr(),
        [num_filters, channels // parts, *window],
        x.dtype,
        default_initializer=Normal(0.0, math.sqrt(2.0 / (math.prod(window) * channels))),
    )
    attrs = {
        **window_attributes(layer, stride, padding, data_format),
        "dilations": sizes_of(layer, "dilation", dilation, axes),
        "groups": parts,
        "use_cudnn": use_cudnn,
    }
    (made,) = helper.add({"Input": x, "Filter": weight}, {"Output": x.dtype}, attrs)
    channel_axis = 1 if data_format.startswith("NC") else axes + 1
    made = helper.with_bias(made, bias_attr, num_filters, channel_axis)
    return helper.with_activation(made, act)


conv2d = _over(2, "conv2d", _convolution)
conv3d = _over(3, "conv3d", _convolution)


def conv2d_transpose(
    input: Variable,
    num_filters: int,
    output_size: Size | None = None,
    filter_size: Size | None = None,
    padding: Padding = 0,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Variable:
    """Transposed convolution: the gradient of a convolution as a layer, which enlarges images.

    Raises:
        ProgramError: neither `filter_size` nor `output_size` is given.
    """
    layer = "conv2d_transpose"
    (x,) = variables(layer, "input", input)
    channels, parts = channels_of(layer, x, data_format), groups or 1
    if filter_size is None:
        raise mistake("conv2d_transpose: filter_size is needed")
    helper = LayerHelper(layer, name)
    window = sizes_of(layer, "filter_size", filter_size)
    shape = [channels, num_filters // parts, *window]
    weight = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), shape, x.dtype)
    attrs = {
        **window_attributes(layer, stride, padding, data_format),
        "dilations": sizes_of(layer, "dilation", dilation),
        "groups": parts,
        "use_cudnn": use_cudnn,
        "output_size": [] if output_size is None else sizes_of(layer, "output_size", output_size),
    }
    (made,) = helper.add({"Input": x, "Filter": weight}, {"Output": x.dtype}, attrs)
    made = helper.with_bias(made, bias_attr, num_filters, 1 if data_format == "NCHW" else 3)
    return helper.with_activation(made, act)


def _pooling(
    axes: int,
    input: Variable,
    pool_size: Size = -1,
    pool_type: str = "max",
    pool_stride: Size = 1,
    pool_padding: Padding = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "",
) -> Variable:
    """Maximum or average of each window.

    Raises:
        ValueError: there is no such pooling type, or a pooling that is not global has no size.
    """
    layer, data_format = f"pool{axes}d", data_format or _FORMATS[axes][0]
    (x,) = variables(layer, "input", input)
    check_pooling(layer, pool_type)
    channels_of(layer, x, data_format, axes)
    if not global_pooling and pool_size == -1:
        raise mistake(f"{layer}: pool_size is needed unless global_pooling is True")
    attrs = {
        **window_attributes(layer, pool_stride, pool_padding, data_format),
        "pooling_type": pool_type,
        "ksize": sizes_of(layer, "pool_size", pool_size, axes),
        "global_pooling": global_pooling,
        "use_cudnn": use_cudnn,
        "ceil_mode": ceil_mode,
        "exclusive": exclusive,
    }
    (made,) = LayerHelper(layer, name).add({"X": x}, {"Out": x.dtype}, attrs)
    return made


pool2d = _over(2, "pool2d", _pooling)
pool3d = _over(3, "pool3d", _pooling)


def adaptive_pool2d(
    input: Variable,
    pool_size: Size,
    pool_type: str = "max",
    require_index: bool = False,
    name: str | None = None,
) -> Variable:
    """Pools into a fixed number of windows.

    Raises:
        ValueError: there is no such pooling type, or indices are requested.
    """
    (x,) = variables("adaptive_pool2d", "input", input)
    check_pooling("adaptive_pool2d", pool_type)
    if require_index:
        raise mistake("adaptive_pool2d: the places of the largest elements are not kept")
    window = sizes_of("adaptive_pool2d", "pool_size", pool_size)
    attrs = {"pooling_type": pool_type, "ksize": window, "adaptive": True}
    helper = LayerHelper("adaptive_pool2d", name)
    (made,) = helper.add({"X": x}, {"Out": x.dtype}, attrs, op_type="pool2d")
    return made


def channels_of(layer: str, x: Variable, data_format: str, axes: int = 2) -> int:
    """Number of channels of `x`, the input of a layer with this many spatial axes."""
    _check_format(layer, data_format, axes)
    if len(x.shape) != axes + 2:
        kind = f"{_KINDS[axes][0]} of {axes + 2} axes"
        raise mistake(f"{layer} takes {kind}, not {list(x.shape)}")
    channels = x.shape[1 if data_format.startswith("NC") else -1]
    if channels < 0:
        raise mistake(f"{layer}: how many channels '{x.name}' has is not known")
    return channels


def _check_format(layer: str, data_format: str, axes: int) -> None:
    if data_format not in _FORMATS[axes]:
        wanted = " or ".join(map(repr, _FORMATS[axes]))
        raise mistake(f"{layer}: data_format is {wanted}, not {data_format!r}")


def check_pooling(layer: str, pool_type: str) -> None:
    """Checks that there is such a pooling type."""
    if pool_type not in {"max", "avg"}:
        raise mistake(f"{layer}: pool_type is 'max' or 'avg', not {pool_type!r}")


def sizes_of(layer: str, argument: str, given: Size, axes: int = 2) -> list[int]:
    """Expands a size to one number per spatial axis."""
    sizes = [given] * axes if isinstance(given, int) else list(given)
    if len(sizes) != axes or not all(isinstance(each, int) for each in sizes):
        raise mistake(f"{layer}: {argument} is {_KINDS[axes][1]}, not {given!r}")
    return sizes


def window_attributes(
    layer: str, stride: Size, padding: Padding, data_format: str
) -> dict[str, Any]:
    """Attributes for stride, padding and layout of windows."""
    axes = len(data_format) - 2
    made: dict[str, Any] = {
        "strides": sizes_of(layer, "stride", stride, axes),
        "padding_algorithm": "EXPLICIT",
        "data_format": data_format,
    }
    if isinstance(padding, str):
        if padding.upper() not in {"SAME", "VALID"}:
            raise mistake(f"{layer}: padding is 'SAME', 'VALID' or numbers, not {padding!r}")
        return {**made, "padding_algorithm": padding.upper(), "paddings": [0] * axes}
    return {**made, "paddings": _paddings(layer, padding, data_format)}


def _paddings(layer: str, padding: int | Sequence[Any], data_format: str) -> list[int]:
    axes = len(data_format) - 2
    if isinstance(padding, int):
        return [padding] * axes
    given = list(padding)
    if len(given) == axes + 2 and all(isinstance(pair, list | tuple) for pair in given):
        first = 2 if data_format.startswith("NC") else 1
        moved = range(first, first + axes)
        if any(any(pair) for axis, pair in enumerate(given) if axis not in moved):
            raise mistake(f"{layer}: only {_KINDS[axes][2]} can be padded, not {padding!r}")
        given = [size for axis in moved for size in given[axis]]
    if len(given) not in {axes, 2 * axes} or not all(isinstance(each, int) for each in given):
        raise mistake(f"{layer}: padding is {_KINDS[axes][3]}, not {padding!r}")
    if len(given) == 2 * axes and given[::2] == given[1::2]:
        return given[::2]
    return given


_AXES = {"BILINEAR": 2, "NEAREST": 2, "TRILINEAR": 3}
_NAMES = {2: ("out_h", "out_w"), 3: ("out_d", "out_h", "out_w")}


def image_resize(
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    resample: str = "BILINEAR",
    actual_shape: Any = None,
    align_corners: bool = True,
    align_mode: int = 1,
    data_format: str = "NCHW",
) -> Variable:
    """Resizes images `[b,c,h,w]`, or volumes `[b,c,d,h,w]`.

    `out_shape` has the spatial sizes as numbers, or `scale` is their factor. `resample` is
    `BILINEAR`, `NEAREST`, or for volumes `TRILINEAR`. With `align_corners` corner elements are
    mapped to corner elements; otherwise `align_mode` is the position of an element: 0 for its
    center, 1 for its beginning. `data_format` is `NCHW` or `NHWC`, with a `D` for volumes;
    `actual_shape` is unsupported, as shapes are known before a run.

    Raises:
        ProgramError: there is no such method, the input has the wrong rank, or no size is given.
    """
    if resample not in _AXES:
        hint = "one of BILINEAR, NEAREST and TRILINEAR"
        raise mistake(f"image_resize: there is no resample {resample!r}", hint)
    layer, (x,) = f"resize_{resample.lower()}", variables("image_resize", "input", input)
    axes = _AXES[resample]
    if len(x.shape) != axes + 2:
        raise mistake(f"{layer} takes {axes + 2} axes, not {list(x.shape)}")
    _check_format(layer, data_format, axes)
    if align_mode not in {0, 1}:
        raise mistake(f"{layer}: align_mode is 0 or 1, not {align_mode!r}")
    attrs = {
        **_wanted(layer, axes, out_shape, scale, actual_shape),
        "interp_method": resample.lower(),
        "align_corners": align_corners,
        "align_mode": align_mode,
        "data_layout": "NHWC" if data_format.endswith("C") else "NCHW",
    }
    (made,) = LayerHelper(f"{resample.lower()}_interp", name).add({"X": x}, {"Out": x.dtype}, attrs)
    return made


def _resizing(
    axes: int,
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    actual_shape: Any = None,
    align_corners: bool = True,
    align_mode: int = 1,
    data_format: str = "",
) -> Variable:
    """Resizes by linear interpolation along each axis: see `image_resize`."""
    resample = "BILINEAR" if axes == 2 else "TRILINEAR"
    how = (align_corners, align_mode, data_format or _FORMATS[axes][0])
    return image_resize(input, out_shape, scale, name, resample, actual_shape, *how)


resize_bilinear = _over(2, "resize_bilinear", _resizing)
resize_trilinear = _over(3, "resize_trilinear", _resizing)


def resize_nearest(
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    actual_shape: Any = None,
    align_corners: bool = True,
    data_format: str = "NCHW",
) -> Variable:
    """Resizes images by nearest-neighbor interpolation: see `image_resize`."""
    how = (align_corners, 1, data_format)
    return image_resize(input, out_shape, scale, name, "NEAREST", actual_shape, *how)


def image_resize_short(input: Variable, out_short_len: int, resample: str = "BILINEAR") -> Variable:
    """Resizes images `[b,c,h,w]` to a given shorter side, keeping the aspect ratio.

    Raises:
        ProgramError: the input is not images of known sizes.
    """
    (x,) = variables("image_resize_short", "input", input)
    if len(x.shape) != 4 or min(x.shape[2:]) < 0:
        raise mistake(f"image_resize_short takes images of known sizes, not {list(x.shape)}")
    short = min(x.shape[2:])
    sizes = [int(size * (out_short_len / short) + 0.5) for size in x.shape[2:]]
    sizes[x.shape[2:].index(short)] = out_short_len
    return image_resize(input, sizes, resample=resample)


def _wanted(
    layer: str, axes: int, out_shape: Any, scale: Any, actual_shape: Any
) -> dict[str, float]:
    parts = list(out_shape) if isinstance(out_shape, list | tuple) else [out_shape]
    given = {"out_shape": parts, "scale": [scale], "actual_shape": [actual_shape]}
    for argument, values in given.items():
        is_given = argument == "actual_shape" and actual_shape is not None
        if is_given or any(isinstance(value, Variable) for value in values):
            what = f"{layer}: '{argument}' is a variable, and shapes are known before a run"
            raise mistake(what, "give numbers")
    if out_shape is None and scale is None:
        raise mistake(f"{layer}: neither out_shape nor scale is given")
    if out_shape is None:
        if not scale > 0:
            raise mistake(f"{layer}: scale is more than 0, not {scale!r}")
        return {"scale": float(scale)}
    if len(parts) != axes or not all(isinstance(n, int) and n > 0 for n in parts):
        raise mistake(f"{layer}: out_shape is {axes} numbers of at least 1, not {out_shape!r}")
    return dict(zip(_NAMES[axes], parts, strict=True))
