"""Losses over many classes that look at a few of them."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.variable import Variable
from jaxfleet.ops.fluid.many_classes import LOG_UNIFORM, UNIFORM

_SAMPLERS = {"uniform": UNIFORM, "log_uniform": LOG_UNIFORM}


def nce(
    input: Variable,
    label: Variable,
    num_total_classes: int,
    sample_weight: Variable | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    num_neg_samples: int | None = None,
    name: str | None = None,
    sampler: str = "uniform",
    custom_dist: Sequence[float] | None = None,
    seed: int = 0,
    is_sparse: bool = False,
) -> Variable:
    """Takes the cost of telling true classes from drawn ones: f32[b,d], i64[b,true] -> f32[b,1].

    Args:
        input: what classes are told by.
        label: the true classes of each row.
        num_total_classes: the number of classes.
        sample_weight: f32[b,1], what each row counts.
        param_attr: of the weight, f32[classes,d].
        bias_attr: of the bias, f32[classes,1]; False for none.
        num_neg_samples: the number of classes that are drawn for each row, 10 unless given.
        name: of the layer.
        sampler: `uniform`, or `log_uniform` for classes that are sorted by how frequent they are.
        custom_dist: refused, with the sampler `custom_dist`.
        seed: of what is drawn; 0 for other draws in each run.
        is_sparse: taken; the gradient of the weight is computed whole, with the same values.

    Raises:
        ProgramError: there is no such sampler.
    """
    (x,), (true,) = variables("nce", "input", input), variables("nce", "label", label)
    if sampler not in _SAMPLERS or custom_dist is not None:
        message = f"nce: the sampler {sampler!r} is not supported"
        raise mistake(message, f"one of {', '.join(_SAMPLERS)}, without a custom_dist")
    helper, dim = LayerHelper("nce", name), x.shape[1]
    attr = ParamAttr.of(param_attr) or ParamAttr()
    inputs = {"Input": x, "Label": true}
    inputs["Weight"] = helper.parameter(attr, [num_total_classes, dim], x.dtype)
    if (of_bias := ParamAttr.of(bias_attr)) is not None:
        shape = [num_total_classes, 1]
        inputs["Bias"] = helper.parameter(of_bias, shape, x.dtype, is_bias=True)
    if sample_weight is not None:
        inputs["SampleWeight"] = sample_weight
    attrs = {
        "num_total_classes": num_total_classes,
        "num_neg_samples": 10 if num_neg_samples is None else num_neg_samples,
        "seed": seed,
        "sampler": _SAMPLERS[sampler],
        "is_sparse": is_sparse,
    }
    aside = {
        "SampleLogits": helper.output(x.dtype, stop_gradient=True),
        "SampleLabels": helper.output(true.dtype, stop_gradient=True),
    }
    cost, *_ = helper.add(inputs, {"Cost": x.dtype, **aside}, attrs)
    return cost


def hsigmoid(
    input: Variable,
    label: Variable,
    num_classes: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
    path_table: Variable | None = None,
    path_code: Variable | None = None,
    is_custom: bool = False,
    is_sparse: bool = False,
) -> Variable:
    """Takes the cost of the decisions on the way to a class: f32[b,d], i64[b,1] -> f32[b,1].

    Args:
        input: what decisions are made by.
        label: the class of each row.
        num_classes: the number of classes; with a tree of the caller's own, of its inner nodes.
        param_attr: of the weight, f32[nodes,d].
        bias_attr: of the bias, f32[nodes,1]; False for none.
        name: of the layer.
        path_table: i64[b,length], the nodes on the way to each row's class, -1 behind its end.
        path_code: i64[b,length], the turns that are taken there, 0 or 1.
        is_custom: the tree is the caller's own, given by the two before.
        is_sparse: taken; the gradient of the weight is computed whole, with the same values.

    Raises:
        ProgramError: a tree is given in part, or there are fewer classes than two.
    """
    if (path_table is None) != (path_code is None) or is_custom != (path_table is not None):
        hint = "give is_custom=True, path_table and path_code together"
        raise mistake("hsigmoid: a tree of your own is given in part", hint)
    if num_classes < 2:
        raise mistake(f"hsigmoid: {num_classes} classes need no decision", "give at least two")
    (x,), (true,) = variables("hsigmoid", "input", input), variables("hsigmoid", "label", label)
    helper = LayerHelper("hierarchical_sigmoid", name)
    nodes = num_classes if is_custom else num_classes - 1
    attr = ParamAttr.of(param_attr) or ParamAttr()
    weight = helper.parameter(attr, [nodes, x.shape[1]], x.dtype)
    inputs = {"X": x, "W": weight, "Label": true}
    if path_table is not None and path_code is not None:
        inputs |= {"PathTable": path_table, "PathCode": path_code}
    if (of_bias := ParamAttr.of(bias_attr)) is not None:
        inputs["Bias"] = helper.parameter(of_bias, [nodes, 1], x.dtype, is_bias=True)
    aside = {slot: helper.output(x.dtype, stop_gradient=True) for slot in ("PreOut", "W_Out")}
    attrs = {"num_classes": num_classes, "is_sparse": is_sparse}
    cost, *_ = helper.add(inputs, {"Out": x.dtype, **aside}, attrs)
    return cost
