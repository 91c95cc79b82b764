"""Common groups of layers."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid import layers
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layers.convolution import Padding, Size


def simple_img_conv_pool(
    input: Variable,
    num_filters: int,
    filter_size: Size,
    pool_size: Size,
    pool_stride: Size,
    pool_padding: Padding = 0,
    pool_type: str = "max",
    global_pooling: bool = False,
    conv_stride: Size = 1,
    conv_padding: Padding = 0,
    conv_dilation: Size = 1,
    conv_groups: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    use_cudnn: bool = True,
) -> Variable:
    """Adds a convolution and a pooling of its output."""
    made = layers.conv2d(
        input,
        num_filters,
        filter_size,
        stride=conv_stride,
        padding=conv_padding,
        dilation=conv_dilation,
        groups=conv_groups,
        param_attr=param_attr,
        bias_attr=bias_attr,
        act=act,
        use_cudnn=use_cudnn,
    )
    return layers.pool2d(
        made,
        pool_size,
        pool_type,
        pool_stride,
        pool_padding,
        global_pooling=global_pooling,
        use_cudnn=use_cudnn,
    )


def img_conv_group(
    input: Variable,
    conv_num_filter: Sequence[int],
    pool_size: Size,
    conv_padding: int | Sequence[int] = 1,
    conv_filter_size: int | Sequence[int] = 3,
    conv_act: str | None = None,
    param_attr: Any = None,
    conv_with_batchnorm: bool | Sequence[bool] = False,
    conv_batchnorm_drop_rate: float | Sequence[float] = 0.0,
    pool_stride: Size = 1,
    pool_type: str = "max",
    use_cudnn: bool = True,
) -> Variable:
    """Adds convolutions, each with an optional batch_norm and dropout, and a pooling."""
    count = len(conv_num_filter)
    paddings = _each("conv_padding", conv_padding, count)
    sizes = _each("conv_filter_size", conv_filter_size, count)
    attrs = _each("param_attr", param_attr, count)
    normalized = _each("conv_with_batchnorm", conv_with_batchnorm, count)
    rates = _each("conv_batchnorm_drop_rate", conv_batchnorm_drop_rate, count)
    made = input
    for at, filters in enumerate(conv_num_filter):
        made = layers.conv2d(
            made,
            filters,
            sizes[at],
            padding=paddings[at],
            param_attr=attrs[at],
            act=None if normalized[at] else conv_act,
            use_cudnn=use_cudnn,
        )
        if normalized[at]:
            made = layers.batch_norm(made, act=conv_act)
            made = layers.dropout(made, rates[at]) if abs(rates[at]) > 1e-5 else made
    return layers.pool2d(made, pool_size, pool_type, pool_stride, use_cudnn=use_cudnn)


def _each(argument: str, given: Any, count: int) -> list[Any]:
    """Returns a value for each convolution, from one for all or a list."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise mistake(f"img_conv_group: {count} convolutions have {len(given)} {argument}")
    return list(given)


def sequence_conv_pool(
    input: Variable,
    num_filters: int,
    filter_size: int,
    param_attr: Any = None,
    act: str | None = "sigmoid",
    pool_type: str = "max",
    bias_attr: Any = None,
) -> Variable:
    """Adds a convolution over sequences, and pools each sequence to one row."""
    made = layers.sequence_conv(
        input, num_filters, filter_size, param_attr=param_attr, bias_attr=bias_attr, act=act
    )
    return layers.sequence_pool(made, pool_type)


def glu(input: Variable, dim: int = -1) -> Variable:
    """Multiplies one half along an axis by the sigmoid of the other (Dauphin et al., 2017)."""
    value, gate = layers.split(input, 2, dim)
    return layers.elementwise_mul(value, layers.sigmoid(gate))
