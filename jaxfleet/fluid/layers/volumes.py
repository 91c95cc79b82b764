"""Layers on volumes: what those on images are, with a depth.

Volumes are `NCDHW` or `NDHWC`. A size is a number or three; a padding also six numbers, two for
each axis, a pair for each of the five axes, `"SAME"` or `"VALID"`.
"""

import math
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.initializer import Normal
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.layers.windows import (
    Padding,
    Size,
    channels_of,
    check_pooling,
    placing,
    sizes_of,
)
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.variable import Variable


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
    """Slides filters over volumes, and adds a bias to each channel.

    Raises:
        ProgramError: the channels do not divide into the groups, or a padding is none.
    """
    (x,) = variables("conv3d", "input", input)
    channels, parts = channels_of("conv3d", x, data_format, 3), groups or 1
    if channels % parts or num_filters % parts:
        what = f"conv3d: {channels} channels and {num_filters} filters are not {parts} groups"
        raise mistake(what)
    helper = LayerHelper("conv3d", name)
    window = sizes_of("conv3d", "filter_size", filter_size, 3)
    weight = helper.parameter(
        ParamAttr.of(param_attr) or ParamAttr(),
        [num_filters, channels // parts, *window],
        x.dtype,
        default_initializer=Normal(0.0, math.sqrt(2.0 / (math.prod(window) * channels))),
    )
    attrs = {
        **placing("conv3d", stride, padding, data_format),
        "dilations": sizes_of("conv3d", "dilation", dilation, 3),
        "groups": parts,
        "use_cudnn": use_cudnn,
    }
    (made,) = helper.add({"Input": x, "Filter": weight}, {"Output": x.dtype}, attrs)
    made = helper.with_bias(made, bias_attr, num_filters, 1 if data_format == "NCDHW" else 4)
    return helper.with_activation(made, act)


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
    """Takes the largest element of each window, or their average.

    Raises:
        ValueError: there is no such type of pooling, or no size where the pooling is not global.
    """
    (x,) = variables("pool3d", "input", input)
    check_pooling("pool3d", pool_type)
    channels_of("pool3d", x, data_format, 3)
    if not global_pooling and pool_size == -1:
        raise mistake("pool3d: pool_size is needed unless global_pooling is True")
    attrs = {
        **placing("pool3d", pool_stride, pool_padding, data_format),
        "pooling_type": pool_type,
        "ksize": sizes_of("pool3d", "pool_size", pool_size, 3),
        "global_pooling": global_pooling,
        "use_cudnn": use_cudnn,
        "ceil_mode": ceil_mode,
        "exclusive": exclusive,
    }
    (made,) = LayerHelper("pool3d", name).add({"X": x}, {"Out": x.dtype}, attrs)
    return made
