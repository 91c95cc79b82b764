"""Layers that give values mean 0 and deviation 1, with a scale and a shift that are learned."""

import math
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.initializer import Constant
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.variable import Parameter, Variable


def batch_norm(
    input: Variable,
    act: str | None = None,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
) -> Variable:
    """Normalizes each channel by the batch; tested, by averages over the batches so far.

    Args:
        input: `[rows, channels]`, or images.
        act: an activation.
        is_test: normalize by the averages.
        momentum: how much of the averages stays with a batch.
        epsilon: is added to the variance.
        param_attr: of the scale.
        bias_attr: of the shift.
        data_layout: `NCHW`, or `NHWC` where the channels are last.
        in_place: taken; XLA decides itself what to reuse.
        name: of the layer.
        moving_mean_name: what the average of means is called.
        moving_variance_name: what the average of variances is called.
        do_model_average_for_mean_and_var: whether ModelAverage takes these in.
        use_global_stats: normalize by the averages in training too.

    Raises:
        ProgramError: how many channels there are is not known, or the layout is none.
    """
    del in_place
    (x,) = variables("batch_norm", "input", input)
    if not 2 <= len(x.shape) <= 5:
        what = f"batch_norm takes an input of 2 to 5 axes, and '{x.name}' has {len(x.shape)}"
        raise mistake(what, "its channels are axis 1, or the last one with data_layout='NHWC'")
    if data_layout not in {"NCHW", "NHWC"}:
        raise mistake(f"batch_norm: data_layout is 'NCHW' or 'NHWC', not {data_layout!r}")
    channels = x.shape[1 if data_layout == "NCHW" else -1]
    helper = LayerHelper("batch_norm", name)
    scale = _learned(helper, param_attr, channels, x.dtype, default=1.0)
    bias = _learned(helper, bias_attr, channels, x.dtype, is_bias=True)
    mean, variance = (
        _kept(helper, kept, begin, channels, x.dtype, averaged=do_model_average_for_mean_and_var)
        for kept, begin in ((moving_mean_name, 0.0), (moving_variance_name, 1.0))
    )
    attrs = {
        "momentum": momentum,
        "epsilon": epsilon,
        "is_test": is_test,
        "data_layout": data_layout,
        "use_global_stats": use_global_stats,
    }
    saved = [helper.output(x.dtype, stop_gradient=True) for _ in range(2)]
    made, *_ = helper.add(
        {"X": x, "Scale": scale, "Bias": bias, "Mean": mean, "Variance": variance},
        {"Y": x.dtype, "MeanOut": mean, "VarianceOut": variance, "SavedMean": saved[0],
         "SavedVariance": saved[1]},
        attrs,
    )  # fmt: skip
    return helper.with_activation(made, act)


def _kept(
    helper: LayerHelper, name: str | None, begin: float, size: int, dtype: str, *, averaged: bool
) -> Parameter:
    """Makes an average over the batches, which no optimizer updates."""
    attr = ParamAttr(name, Constant(begin), trainable=False, do_model_average=averaged)
    made = helper.parameter(attr, [size], dtype)
    made.stop_gradient = True
    return made


def layer_norm(
    input: Variable,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Normalizes each row: the axes before `begin_norm_axis` number the rows."""
    (x,) = variables("layer_norm", "input", input)
    helper = LayerHelper("layer_norm", name)
    width = math.prod(x.shape[begin_norm_axis:])
    inputs: dict[str, Variable] = {"X": x}
    if scale:
        inputs["Scale"] = _learned(helper, param_attr, width, x.dtype, default=1.0)
    if shift:
        inputs["Bias"] = _learned(helper, bias_attr, width, x.dtype, is_bias=True)
    statistics = {slot: helper.output(x.dtype, stop_gradient=True) for slot in ("Mean", "Variance")}
    made, *_ = helper.add(
        inputs,
        {"Y": x.dtype, **statistics},
        {"epsilon": epsilon, "begin_norm_axis": begin_norm_axis},
    )
    return helper.with_activation(made, act)


def group_norm(
    input: Variable,
    groups: int,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    data_layout: str = "NCHW",
    name: str | None = None,
) -> Variable:
    """Normalizes groups of channels of each row: f32[b,c,...] to the same.

    Args:
        input: what is normalized.
        groups: the number of groups, which divides that of channels.
        epsilon: added to the variance.
        param_attr: of the scale, f32[c]; False for none.
        bias_attr: of the bias, f32[c]; False for none.
        act: an activation.
        data_layout: `NCHW`, or `NHWC` where channels are last.
        name: of the layer.

    Raises:
        ProgramError: the groups do not divide the channels, or there is no such layout.
    """
    (x,) = variables("group_norm", "input", input)
    if data_layout not in {"NCHW", "NHWC"}:
        raise mistake(f"group_norm: there is no data_layout {data_layout!r}", "NCHW or NHWC")
    width = x.shape[1 if data_layout == "NCHW" else -1]
    if groups < 1 or width % groups:
        raise mistake(f"group_norm: {groups} groups do not divide {width} channels")
    helper = LayerHelper("group_norm", name)
    inputs: dict[str, Variable] = {"X": x}
    if param_attr is not False:
        inputs["Scale"] = _learned(helper, param_attr, width, x.dtype, default=1.0)
    if bias_attr is not False:
        inputs["Bias"] = _learned(helper, bias_attr, width, x.dtype, is_bias=True)
    statistics = {slot: helper.output(x.dtype, stop_gradient=True) for slot in ("Mean", "Variance")}
    made, *_ = helper.add(
        inputs,
        {"Y": x.dtype, **statistics},
        {"epsilon": epsilon, "groups": groups, "data_layout": data_layout},
    )
    return helper.with_activation(made, act)


def _learned(
    helper: LayerHelper,
    attr: Any,
    size: int,
    dtype: str,
    *,
    is_bias: bool = False,
    default: float = 0.0,
) -> Parameter:
    described = ParamAttr.of(attr) or ParamAttr()
    begin = Constant(default)
    return helper.parameter(described, [size], dtype, is_bias=is_bias, default_initializer=begin)
