"""Convolution and pooling over images (2d) and volumes (3d).

Images are `NCHW` or `NHWC`. A size is a number or two; a padding may also be four numbers (top,
bottom, left, right), a pair for each of the four axes, `"SAME"` or `"VALID"`. Volumes are `NCDHW`
or `NDHWC`. A size is a number or three; a padding may also be six numbers, two for each axis, a
pair for each of the five axes, `"SAME"` or `"VALID"`.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.initializer import Normal
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.param_attr import ParamAttr

Size: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | str | Sequence[Any]

_FORMATS = {"NCHW": 2, "NHWC": 2, "NCDHW": 3, "NDHWC": 3}  # -> number of spatial axes
_KINDS = {2: ("images", "a number or two", "height and width", "a number, two or four"),
          3: ("volumes", "a number or three", "depth, height and width",
              "a number, three or six")}  # fmt: skip


def convolution(
    axes: int,
    input: Variable,
    num_filters: int,
    filter_size: Size,
    stride: Size,
    padding: Padding,
    dilation: Size,
    groups: int | None,
    param_attr: Any,
    bias_attr: Any,
    use_cudnn: bool,
    act: str | None,
    name: str | None,
    data_format: str,
) -> Variable:
    """Adds `conv2d` or `conv3d`, by the number of spatial axes."""
    layer = f"conv{axes}d"
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


def pooling(
    axes: int,
    input: Variable,
    pool_size: Size,
    pool_type: str,
    pool_stride: Size,
    pool_padding: Padding,
    global_pooling: bool,
    use_cudnn: bool,
    ceil_mode: bool,
    name: str | None,
    exclusive: bool,
    data_format: str,
) -> Variable:
    """Adds `pool2d` or `pool3d`, by the number of spatial axes."""
    layer = f"pool{axes}d"
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


def channels_of(layer: str, x: Variable, data_format: str, axes: int = 2) -> int:
    """Number of channels of `x`, the input of a layer with this many spatial axes."""
    formats = [name for name, count in _FORMATS.items() if count == axes]
    if data_format not in formats:
        wanted = " or ".join(map(repr, formats))
        raise mistake(f"{layer}: data_format is {wanted}, not {data_format!r}")
    if len(x.shape) != axes + 2:
        what = f"{layer} takes {_KINDS[axes][0]} of {axes + 2} axes, not {list(x.shape)}"
        raise mistake(what)
    channels = x.shape[1 if data_format == formats[0] else -1]
    if channels < 0:
        raise mistake(f"{layer}: how many channels '{x.name}' has is not known")
    return channels


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
    axes = _FORMATS[data_format]
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
    axes = _FORMATS[data_format]
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


def conv2d(
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
    data_format: str = "NCHW",
) -> Variable:
    """Convolves images with filters, and adds a bias to each channel.

    Raises:
        ProgramError: the groups do not divide the channels, or a padding is invalid.
    """
    return convolution(
        2, input, num_filters, filter_size, stride, padding, dilation, groups, param_attr,
        bias_attr, use_cudnn, act, name, data_format,
    )  # fmt: skip


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
    (x,) = variables("conv2d_transpose", "input", input)
    channels, parts = channels_of("conv2d_transpose", x, data_format), groups or 1
    if filter_size is None:
        raise mistake("conv2d_transpose: filter_size is needed")
    helper = LayerHelper("conv2d_transpose", name)
    window = sizes_of("conv2d_transpose", "filter_size", filter_size)
    shape = [channels, num_filters // parts, *window]
    weight = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), shape, x.dtype)
    attrs = {
        **window_attributes("conv2d_transpose", stride, padding, data_format),
        "dilations": sizes_of("conv2d_transpose", "dilation", dilation),
        "groups": parts,
        "use_cudnn": use_cudnn,
        "output_size": []
        if output_size is None
        else sizes_of("conv2d_transpose", "output_size", output_size),
    }
    (made,) = helper.add({"Input": x, "Filter": weight}, {"Output": x.dtype}, attrs)
    made = helper.with_bias(made, bias_attr, num_filters, 1 if data_format == "NCHW" else 3)
    return helper.with_activation(made, act)


def pool2d(
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
    data_format: str = "NCHW",
) -> Variable:
    """Maximum or average of each window.

    Raises:
        ValueError: there is no such pooling type, or a pooling that is not global has no size.
    """
    return pooling(
        2, input, pool_size, pool_type, pool_stride, pool_padding, global_pooling, use_cudnn,
        ceil_mode, name, exclusive, data_format,
    )  # fmt: skip


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


def conv3d(
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
    data_format: str = "NCDHW",
) -> Variable:
    """Convolves volumes with filters, and adds a bias to each channel.

    Raises:
        ProgramError: the groups do not divide the channels, or a padding is invalid.
    """
    return convolution(
        3, input, num_filters, filter_size, stride, padding, dilation, groups, param_attr,
        bias_attr, use_cudnn, act, name, data_format,
    )  # fmt: skip


def pool3d(
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
    data_format: str = "NCDHW",
) -> Variable:
    """Maximum or average of each window.

    Raises:
        ValueError: there is no such pooling type, or a pooling that is not global has no size.
    """
    return pooling(
        3, input, pool_size, pool_type, pool_stride, pool_padding, global_pooling, use_cudnn,
        ceil_mode, name, exclusive, data_format,
    )  # fmt: skip
