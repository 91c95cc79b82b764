"""Layers on images: convolutions and pooling.

Images are `NCHW` or `NHWC`. A size is a number or two; a padding also four numbers (top, bottom,
left, right), a pair for each of the four axes, `"SAME"` or `"VALID"`.
"""

from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.layers.windows import (
    Padding,
    Size,
    channels_of,
    check_pooling,
    convolution,
    placing,
    pooling,
    sizes_of,
)
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.variable import Variable


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
    """Does what the gradient of a convolution does, which makes images larger.

    Raises:
        ProgramError: neither the size of the filters nor that of the result is given.
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
        **placing("conv2d_transpose", stride, padding, data_format),
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
    """Takes the largest element of each window, or their average.

    Raises:
        ValueError: there is no such type of pooling, or no size where the pooling is not global.
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
    """Pools into so many windows.

    Raises:
        ValueError: there is no such type of pooling, or the places of elements are asked for.
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
