"""Batch, layer, group and data normalization."""

import math
from collections.abc import Mapping
from typing import Any

from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.fluid.initializer import Constant
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.param_attr import ParamAttr


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
    """Normalizes each channel by the batch's statistics; in test, by running averages.

    Args:
        input: `[rows, channels]`, or images.
        act: an activation.
        is_test: normalize by the running averages.
        momentum: share of the running averages that a batch keeps.
        epsilon: added to the variance.
        param_attr: of the scale.
        bias_attr: of the shift.
        data_layout: `NCHW`, or `NHWC` for channels last.
        in_place: no effect; XLA decides on buffer reuse.
        name: of the layer.
        moving_mean_name: name of the running mean.
        moving_variance_name: name of the running variance.
        do_model_average_for_mean_and_var: whether ModelAverage includes them.
        use_global_stats: normalize by the running averages in training too.

    Raises:
        ProgramError: the number of channels is unknown, or there is no such layout.
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
    """Creates a running average, which no optimizer updates."""
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
    """Normalizes each row: the axes before `begin_norm_axis` index the rows."""
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
    """Normalizes groups of channels of each row, f32[b,c,...]; `data_layout` is `NCHW` or `NHWC`.

    The scale and the bias are f32[c]; there is none if its attribute is False.

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


_DECAY = 0.9999999
_BEGIN = {"batch_size": 1e4, "batch_sum": 0.0, "batch_square": 1e4}


def data_norm(
    input: Variable,
    act: str | None = None,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    slot_dim: int = -1,
    sync_stats: bool = False,
    summary_decay_rate: float = _DECAY,
) -> Variable:
    """Normalizes each column by counts and sums of all training rows so far.

    The batch's increments take the place of gradients of these three parameters: they are for a
    Downpour job, whose servers add, and not for an optimizer that subtracts.

    Args:
        input: `[rows, columns]`.
        act: an activation.
        epsilon: added to the squares with each row.
        param_attr: initial values, a dict of `batch_size`, `batch_sum` and `batch_square`; 10000
            rows of mean 0 and deviation 1 unless given.
        data_layout: no effect.
        in_place: no effect; XLA decides on buffer reuse.
        name: of the layer; the parameters are `<name>.batch_size` and so on.
        moving_mean_name: warned of: as in fluid, there is no running mean.
        moving_variance_name: warned of, likewise.
        do_model_average_for_mean_and_var: whether ModelAverage includes these.
        slot_dim: only -1.
        sync_stats: a hint; servers sum the counts of all workers.
        summary_decay_rate: a different rate is warned of: the table's description sets it.

    Raises:
        ProgramError: the input is not a matrix of known width, or `slot_dim` is set.
    """
    del in_place
    if summary_decay_rate != _DECAY:
        reason = "counts decay by the strategy's datanorm_table: summary_decay_rate"
        warn_no_effect("data_norm's summary_decay_rate", reason)
    if moving_mean_name is not None or moving_variance_name is not None:
        reason = "it keeps counts and sums, named by the layer's name, and no running averages"
        warn_no_effect("data_norm's moving_mean_name and moving_variance_name", reason)
    (x,) = variables("data_norm", "input", input)
    if len(x.shape) != 2 or x.shape[1] < 1:
        raise mistake(f"data_norm: the input is [rows, columns], not {list(x.shape)}")
    if slot_dim != -1:
        what = f"data_norm: slot_dim is {slot_dim}"
        raise mistake(what, "only -1 runs here: the rows of no slot are left out")
    helper = LayerHelper("data_norm", name)
    begin = _begin(param_attr)
    size, total, squares = (
        _counted(helper, ending, value, x, averaged=do_model_average_for_mean_and_var)
        for ending, value in begin.items()
    )
    attrs = {
        "epsilon": epsilon,
        "data_layout": data_layout,
        "sync_stats": sync_stats,
        "summary_decay_rate": summary_decay_rate,
    }
    made, *_ = helper.add(
        {"X": x, "BatchSize": size, "BatchSum": total, "BatchSquareSum": squares},
        {
            "Y": x.dtype,
            **{s: helper.output(x.dtype, stop_gradient=True) for s in ("Means", "Scales")},
        },
        attrs,
    )
    return helper.with_activation(made, act)


def _begin(param_attr: Any) -> dict[str, float]:
    """Initial values of the parameters, by suffix of their names."""
    given = param_attr if isinstance(param_attr, Mapping) else {}
    size, total, squares = (float(given.get(name, value)) for name, value in _BEGIN.items())
    if size <= 0 or squares <= 0:
        what = f"data_norm begins with {size} rows and squares of {squares}"
        raise mistake(what, "both are divided by: more than 0")
    return {"batch_size": size, "batch_sum": total, "batch_square_sum": squares}


def _counted(
    helper: LayerHelper, ending: str, begin: float, x: Variable, *, averaged: bool
) -> Parameter:
    name = f"{helper.name}.{ending}"
    attr = ParamAttr(name, Constant(begin), do_model_average=averaged)
    return helper.parameter(attr, [x.shape[1]], x.dtype)
