"""Layers on volumes: what those on images are, with a depth.

Volumes are `NCDHW` or `NDHWC`. A size is a number or three; a padding also six numbers, two for
each axis, a pair for each of the five axes, `"SAME"` or `"VALID"`.
"""

from typing import Any

from jaxfleet.fluid.layers.windows import Padding, Size, convolution, pooling
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
    """Takes the largest element of each window, or their average.

    Raises:
        ValueError: there is no such type of pooling, or no size where the pooling is not global.
    """
    return pooling(
        3, input, pool_size, pool_type, pool_stride, pool_padding, global_pooling, use_cudnn,
        ceil_mode, name, exclusive, data_format,
    )  # fmt: skip
