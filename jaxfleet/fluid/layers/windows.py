"""Convolutions and pooling by windows, and where these stand: of images and of volumes."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.initializer import Normal
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.variable import Variable

Size: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | str | Sequence[Any]

_FORMATS = {"NCHW": 2, "NHWC": 2, "NCDHW": 3, "NDHWC": 3}  # with how many axes windows move along
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
    """Adds `conv2d` or `conv3d`, by the number of axes that windows move along.

    Raises:
        ProgramError: the channels do not divide into the groups, or a padding is none.
    """
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
        **placing(layer, stride, padding, data_format),
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
    """Adds `pool2d` or `pool3d`, by the number of axes that windows move along.

    Raises:
        ProgramError: there is no such type of pooling, or no size where the pooling is not global.
    """
    layer = f"pool{axes}d"
    (x,) = variables(layer, "input", input)
    check_pooling(layer, pool_type)
    channels_of(layer, x, data_format, axes)
    if not global_pooling and pool_size == -1:
        raise mistake(f"{layer}: pool_size is needed unless global_pooling is True")
    attrs = {
        **placing(layer, pool_stride, pool_padding, data_format),
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
    """Returns how many channels images have.

    Args:
        layer: that takes them.
        x: them.
        data_format: says which axis the channels are.
        axes: how many axes windows move along.

    Raises:
        ProgramError: they are not images, or that is not known.
    """
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
    """Checks a type of pooling.

    Raises:
        ProgramError: there is no such one.
    """
    if pool_type not in {"max", "avg"}:
        raise mistake(f"{layer}: pool_type is 'max' or 'avg', not {pool_type!r}")


def sizes_of(layer: str, argument: str, given: Size, axes: int = 2) -> list[int]:
    """Returns a number for each axis that windows move along.

    Raises:
        ProgramError: something else is given.
    """
    sizes = [given] * axes if isinstance(given, int) else list(given)
    if len(sizes) != axes or not all(isinstance(each, int) for each in sizes):
        raise mistake(f"{layer}: {argument} is {_KINDS[axes][1]}, not {given!r}")
    return sizes


def placing(layer: str, stride: Size, padding: Padding, data_format: str) -> dict[str, Any]:
    """Returns the attributes that say where windows stand.

    Raises:
        ProgramError: an argument is not as the layer takes it.
    """
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
