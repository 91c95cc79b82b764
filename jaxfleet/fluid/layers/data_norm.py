"""data_norm: gives columns mean 0 and deviation 1 by all rows so far, which servers count."""

from collections.abc import Mapping
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.initializer import Constant
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.variable import Parameter, Variable

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
    """Normalizes each column by counts and sums of all rows that were trained on so far.

    In the place of gradients, these three parameters have what a batch adds to them: they are for
    a Downpour job, whose servers add, and not for an optimizer that subtracts.

    Args:
        input: `[rows, columns]`.
        act: an activation.
        epsilon: is added to the squares with each row.
        param_attr: what the parameters begin with, a dict of `batch_size`, `batch_sum` and
            `batch_square`; 10000 rows of mean 0 and deviation 1 unless given.
        data_layout: taken.
        in_place: taken; XLA decides itself what to reuse.
        name: of the layer; the parameters are `<name>.batch_size` and so on.
        moving_mean_name: warned of: no running mean is kept, as in fluid.
        moving_variance_name: warned of, as that.
        do_model_average_for_mean_and_var: whether ModelAverage takes these in.
        slot_dim: taken if -1.
        sync_stats: a hint; servers add up what all workers count.
        summary_decay_rate: warned of where it is another: the table's description has it.

    Raises:
        ProgramError: the input is no matrix with a known number of columns, or columns are to be
            left out by slots.
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
    """Returns what the parameters begin with, by how their names end."""
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
