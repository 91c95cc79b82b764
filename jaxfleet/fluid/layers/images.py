"""Layers on images: convolutions and pooling.

Images are `NCHW` or `NHWC`. A size is a number or two; a padding also four numbers (top, bottom,
left, right), a pair for each of the four axes, `"SAME"` or `"VALID"`.
"""

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
    """Slides filters over images, and adds a bias to each channel.

    Raises:
        ProgramError: the channels do not divide into the groups, or a padding is none.
    """
    (x,) = variables("conv2d", "input", input)
    channels, parts = _channels("conv2d", x, data_format), groups or 1
    if channels % parts or num_filters % parts:
        what = f"conv2d: {channels} channels and {num_filters} filters are not {parts} groups"
        raise mistake(what)
    is_depthwise = parts == channels and not use_cudnn
    helper = LayerHelper("depthwise_conv2d" if is_depthwise else "conv2d", name)
    window = _pair("conv2d", "filter_size", filter_size)
    weight = helper.parameter(
        ParamAttr.of(param_attr) or ParamAttr(),
        [num_filters, channels // parts, *window],
        x.dtype,
        default_initializer=Normal(0.0, math.sqrt(2.0 / (math.prod(window) * channels))),
    )
    attrs = {
        **_placing("conv2d", stride, padding, data_format),
        "dilations": _pair("conv2d", "dilation", dilation),
        "groups": parts,
        "use_cudnn": use_cudnn,
    }
    (made,) = helper.add({"Input": x, "Filter": weight}, {"Output": x.dtype}, attrs)
    made = helper.with_bias(made, bias_attr, num_filters, 1 if data_format == "NCHW" else 3)
    return helper.with_activation(made, act)


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
    """Does what the gradient of a convolution does, which makes images larger.

    Raises:
        ProgramError: neither the size of the filters nor that of the result is given.
    """
    (x,) = variables("conv2d_transpose", "input", input)
    channels, parts = _channels("conv2d_transpose", x, data_format), groups or 1
    if filter_size is None:
        raise mistake("conv2d_transpose: filter_size is needed")
    helper = LayerHelper("conv2d_transpose", name)
    window = _pair("conv2d_transpose", "filter_size", filter_size)
    shape = [channels, num_filters // parts, *window]
    weight = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), shape, x.dtype)
    attrs = {
        **_placing("conv2d_transpose", stride, padding, data_format),
        "dilations": _pair("conv2d_transpose", "dilation", dilation),
        "groups": parts,
        "use_cudnn": use_cudnn,
        "output_size": [] if output_size is None else _pair("", "output_size", output_size),
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
    """Takes the largest element of each window, or their average.

    Raises:
        ValueError: there is no such type of pooling, or no size where the pooling is not global.
    """
    (x,) = variables("pool2d", "input", input)
    _check_type("pool2d", pool_type)
    _channels("pool2d", x, data_format)
    if not global_pooling and pool_size == -1:
        raise mistake("pool2d: pool_size is needed unless global_pooling is True")
    attrs = {
        **_placing("pool2d", pool_stride, pool_padding, data_format),
        "pooling_type": pool_type,
        "ksize": _pair("pool2d", "pool_size", pool_size),
        "global_pooling": global_pooling,
        "use_cudnn": use_cudnn,
        "ceil_mode": ceil_mode,
        "exclusive": exclusive,
    }
    (made,) = LayerHelper("pool2d", name).add({"X": x}, {"Out": x.dtype}, attrs)
    return made


def adaptive_pool2d(
    input: Variable,
    pool_size: Size,
    pool_type: str = "max",
    require_index: bool = False,
    name: str | None = None,
) -> Variable:
    """Pools into so many windows.

    Raises:
        ValueError: there is no such type of pooling, or the places of elements are asked for.
    """
    (x,) = variables("adaptive_pool2d", "input", input)
    _check_type("adaptive_pool2d", pool_type)
    if require_index:
        raise mistake("adaptive_pool2d: the places of the largest elements are not kept")
    window = _pair("adaptive_pool2d", "pool_size", pool_size)
    attrs = {"pooling_type": pool_type, "ksize": window, "adaptive": True}
    helper = LayerHelper("adaptive_pool2d", name)
    (made,) = helper.add({"X": x}, {"Out": x.dtype}, attrs, op_type="pool2d")
    return made


def _channels(layer: str, x: Variable, data_format: str) -> int:
    if data_format not in {"NCHW", "NHWC"}:
        raise mistake(f"{layer}: data_format is 'NCHW' or 'NHWC', not {data_format!r}")
    if len(x.shape) != 4:
        raise mistake(f"{layer} takes images of 4 axes, not {list(x.shape)}")
    channels = x.shape[1 if data_format == "NCHW" else 3]
    if channels < 0:
        raise mistake(f"{layer}: how many channels '{x.name}' has is not known")
    return channels


def _check_type(layer: str, pool_type: str) -> None:
    if pool_type not in {"max", "avg"}:
        raise mistake(f"{layer}: pool_type is 'max' or 'avg', not {pool_type!r}")


def _pair(layer: str, argument: str, given: Size) -> list[int]:
    pair = [given, given] if isinstance(given, int) else list(given)
    if len(pair) != 2 or not all(isinstance(each, int) for each in pair):
        raise mistake(f"{layer}: {argument} is a number or two, not {given!r}")
    return pair


def _placing(layer: str, stride: Size, padding: Padding, data_format: str) -> dict[str, Any]:
    """Returns the attributes that say where windows stand."""
    placing: dict[str, Any] = {
        "strides": _pair(layer, "stride", stride),
        "padding_algorithm": "EXPLICIT",
        "data_format": data_format,
    }
    if isinstance(padding, str):
        if padding.upper() not in {"SAME", "VALID"}:
            raise mistake(f"{layer}: padding is 'SAME', 'VALID' or numbers, not {padding!r}")
        return {**placing, "padding_algorithm": padding.upper(), "paddings": [0, 0]}
    return {**placing, "paddings": _paddings(layer, padding, data_format)}


def _paddings(layer: str, padding: int | Sequence[Any], data_format: str) -> list[int]:
    if isinstance(padding, int):
        return [padding, padding]
    given = list(padding)
    if len(given) == 4 and all(isinstance(pair, list | tuple) for pair in given):
        axes = [2, 3] if data_format == "NCHW" else [1, 2]
        if any(any(pair) for axis, pair in enumerate(given) if axis not in axes):
            raise mistake(f"{layer}: only height and width can be padded, not {padding!r}")
        given = [size for axis in axes for size in given[axis]]
    if len(given) not in {2, 4} or not all(isinstance(each, int) for each in given):
        raise mistake(f"{layer}: padding is a number, two or four, not {padding!r}")
    if len(given) == 4 and given[0] == given[1] and given[2] == given[3]:
        return [given[0], given[2]]
    return given
