"""Losses over many classes that look at a few of them."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.indexing import one_hot
from jaxfleet.fluid.layers.losses import softmax_with_cross_entropy
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


def sampled_softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    num_samples: int,
    num_true: int = 1,
    remove_accidental_hits: bool = True,
    use_customized_samples: bool = False,
    customized_samples: Variable | None = None,
    customized_probabilities: Variable | None = None,
    seed: int = 0,
) -> Variable:
    """Takes the cross entropy of true classes among drawn ones: f32[b,1].

    Args:
        logits: f32[b,classes], of all classes.
        label: i64[b,1], the true class of each row.
        num_samples: how many classes are drawn, the same for all rows and no two alike.
        num_true: 1; fluid 1.8.5 takes no other number either.
        remove_accidental_hits: a drawn class that is a row's true one counts for nothing.
        use_customized_samples: take the next two, and draw none.
        customized_samples: i64[b,1+num_samples], with the true class first.
        customized_probabilities: f32[b,1+num_samples], how often each is drawn.
        seed: of what is drawn; 0 for other draws in each run.

    Raises:
        ProgramError: there are several true classes, more samples than classes, or classes are
            given in part.
    """
    layer = "sampled_softmax_with_cross_entropy"
    (x,), (true,) = variables(layer, "logits", logits), variables(layer, "label", label)
    if num_true != 1:
        hint = "one true class in each row; fluid 1.8.5 raises an error for more, too"
        raise mistake(f"{layer}: num_true is 1, not {num_true}", hint)
    own = (customized_samples, customized_probabilities)
    if any((one is not None) != use_customized_samples for one in own):
        hint = "give use_customized_samples=True, customized_samples and customized_probabilities"
        raise mistake(f"{layer}: classes of your own are given in part", hint)
    if not use_customized_samples and not 0 < num_samples <= x.shape[1]:
        raise mistake(f"{layer}: {num_samples} of {x.shape[1]} classes cannot be drawn")
    helper = LayerHelper("sample_logits")
    inputs = {"Logits": x, "Labels": true}
    if customized_samples is not None and customized_probabilities is not None:
        inputs["CustomizedSamples"] = customized_samples
        inputs["CustomizedProbabilities"] = customized_probabilities
    kept = {"Samples": true.dtype, "Probabilities": x.dtype, "SampledLabels": true.dtype,
            "LogitsDim": x.dtype, "LabelsDim": true.dtype}  # fmt: skip
    outputs = {slot: helper.output(dtype, stop_gradient=True) for slot, dtype in kept.items()}
    outputs["SampledLogits"] = helper.output(x.dtype)
    attrs = {
        "use_customized_samples": use_customized_samples,
        "uniq": True,
        "remove_accidental_hits": remove_accidental_hits,
        "num_samples": num_samples,
        "seed": seed,
    }
    helper.append_op("sample_logits", inputs, outputs, attrs)
    target = one_hot(outputs["SampledLabels"], num_samples + 1)
    loss = softmax_with_cross_entropy(
        outputs["SampledLogits"], target, soft_label=True, numeric_stable_mode=False
    )
    assert isinstance(loss, Variable)
    return loss
