"""Losses, including sampled losses over many classes, and metrics: accuracy and AUC."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import one_operator, variables
from jaxfleet.fluid.layers.manipulation import one_hot
from jaxfleet.fluid.layers.math_ops import reduce_mean
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.ops.fluid.sampled_losses import LOG_UNIFORM, UNIFORM


def square_error_cost(input: Variable, label: Variable) -> Variable:
    """Squared difference by element."""
    helper = LayerHelper("square_error_cost")
    (x,) = variables(helper.layer_type, "input", input)
    (y,) = variables(helper.layer_type, "label", label)
    (less,) = helper.add({"X": x, "Y": y}, {"Out": x.dtype}, op_type="elementwise_sub")
    (out,) = helper.add({"X": less}, {"Out": x.dtype}, op_type="square")
    return out


def mse_loss(input: Variable, label: Variable) -> Variable:
    """Mean squared error: `[1]`."""
    return reduce_mean(square_error_cost(input, label))


@one_operator("cross_entropy", X="input", Label="label", out="Y")
def _cross_entropy(
    input: Variable, label: Variable, soft_label: bool, ignore_index: int
) -> Variable: ...


@one_operator("cross_entropy2", X="input", Label="label", out="Y",
              aside={"XShape": "", "MatchX": ""})  # fmt: skip
def _cross_entropy2(input: Variable, label: Variable, ignore_index: int) -> Variable: ...


def cross_entropy(
    input: Variable, label: Variable, soft_label: bool = False, ignore_index: int = -100
) -> Variable:
    """Negative log of the label's probability: `[..., 1]`.

    Raises:
        TypeError: labels are not integers or, if soft, not probabilities.
    """
    _check_label("cross_entropy", label, soft=soft_label)
    if soft_label:
        return _cross_entropy(input, label, soft_label, ignore_index)
    return _cross_entropy2(input, label, ignore_index)


def _check_label(layer: str, label: object, *, soft: bool) -> None:
    if not isinstance(label, Variable) or label.dtype.startswith("float") == soft:
        return
    kind, dtype = ("probabilities", "float32") if soft else ("classes", "int64")
    what = f"{layer}: labels are {kind}, and '{label.name}' is declared {label.dtype}"
    hint = f"declare it dtype='{dtype}', or say soft_label={not soft}"
    raise mistake(what, hint, WrongTypeError)


def softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Variable | tuple[Variable, Variable]:
    """Softmax and cross entropy in one: `[..., 1]`.

    Raises:
        TypeError: labels are not integers or, if soft, not probabilities.
    """
    _check_label("softmax_with_cross_entropy", label, soft=soft_label)
    helper = LayerHelper("softmax_with_cross_entropy")
    (x,) = variables(helper.layer_type, "logits", logits)
    (y,) = variables(helper.layer_type, "label", label)
    attrs = {
        "soft_label": soft_label,
        "ignore_index": ignore_index,
        "numeric_stable_mode": numeric_stable_mode,
        "axis": axis,
    }
    made, loss = helper.add({"Logits": x, "Label": y}, {"Softmax": x.dtype, "Loss": x.dtype}, attrs)
    return (loss, made) if return_softmax else loss


@one_operator("sigmoid_cross_entropy_with_logits", X="x", Label="label")
def sigmoid_cross_entropy_with_logits(
    x: Variable,
    label: Variable,
    ignore_index: int = -100,
    name: str | None = None,
    normalize: bool = False,
) -> Variable:
    """Cross entropy of independent probabilities, given as logits."""


@one_operator("log_loss", Predicted="input", Labels="label", out="Loss")
def log_loss(
    input: Variable, label: Variable, epsilon: float = 1e-4, name: str | None = None
) -> Variable:
    """Negative log likelihood of a binary label."""


@one_operator("huber_loss", X="input", Y="label", aside={"Residual": ""})
def huber_loss(input: Variable, label: Variable, delta: float) -> Variable:
    """Half the squared difference up to `delta`, linear beyond it."""


@one_operator("label_smooth", X="label", PriorDist="prior_dist", unused=("dtype",))
def label_smooth(
    label: Variable,
    prior_dist: Variable | None = None,
    epsilon: float = 0.1,
    dtype: str = "float32",
    name: str | None = None,
) -> Variable:
    """Mixes labels with a prior distribution, uniform unless given."""


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
    """Noise-contrastive estimation against sampled classes: f32[b,d], i64[b,true] -> f32[b,1].

    Args:
        input: features of each row.
        label: true classes of each row.
        num_total_classes: number of classes.
        sample_weight: f32[b,1], weight of each row.
        param_attr: of the weight, f32[classes,d].
        bias_attr: of the bias, f32[classes,1]; False for none.
        num_neg_samples: classes sampled per row, 10 unless given.
        name: of the layer.
        sampler: `uniform`, or `log_uniform` for classes sorted by descending frequency.
        custom_dist: unsupported, as is the sampler `custom_dist`.
        seed: of the samples; 0 for different ones in each run.
        is_sparse: no effect; the weight's gradient is computed dense, with the same values.

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
    """Hierarchical sigmoid: cost of the decisions on class paths; f32[b,d], i64[b,1] -> f32[b,1].

    Args:
        input: features of each row.
        label: class of each row.
        num_classes: number of classes, or of inner nodes in a custom tree.
        param_attr: of the weight, f32[nodes,d].
        bias_attr: of the bias, f32[nodes,1]; False for none.
        name: of the layer.
        path_table: i64[b,length], nodes on the path to each row's class, padded with -1.
        path_code: i64[b,length], the branches taken there, 0 or 1.
        is_custom: use the custom tree of the two arguments before.
        is_sparse: no effect; the weight's gradient is computed dense, with the same values.

    Raises:
        ProgramError: a custom tree is incomplete, or there are fewer than two classes.
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
    """Cross entropy of the true class among sampled ones: f32[b,1].

    Args:
        logits: f32[b,classes], of all classes.
        label: i64[b,1], true class of each row.
        num_samples: number of distinct classes sampled, shared by all rows.
        num_true: 1; fluid 1.8.5 accepts no other number either.
        remove_accidental_hits: ignore sampled classes that are a row's true one.
        use_customized_samples: use the next two arguments instead of sampling.
        customized_samples: i64[b,1+num_samples], with the true class first.
        customized_probabilities: f32[b,1+num_samples], sampling probability of each.
        seed: of the samples; 0 for different ones in each run.

    Raises:
        ProgramError: there are several true classes, more samples than classes, or incomplete
            customized samples.
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


def accuracy(
    input: Variable,
    label: Variable,
    k: int = 1,
    correct: Variable | None = None,
    total: Variable | None = None,
) -> Variable:
    """Share of rows whose label is among the `k` most likely classes: `[1]`."""
    helper = LayerHelper("accuracy")
    (x,), (y,) = variables("accuracy", "input", input), variables("accuracy", "label", label)
    found = {"Out": x.dtype, "Indices": "int64"}
    values, places = helper.add({"X": x}, found, {"k": k}, op_type="top_k", frozen=True)
    share, _, _ = helper.add(
        {"Out": values, "Indices": places, "Label": y},
        {"Accuracy": "float32", "Correct": correct or "int32", "Total": total or "int32"},
        frozen=True,
    )
    return share


def auc(
    input: Variable,
    label: Variable,
    curve: str = "ROC",
    num_thresholds: int = 2**12 - 1,
    topk: int = 1,
    slide_steps: int = 1,
) -> tuple[Variable, Variable, list[Variable]]:
    """Estimates the area under the ROC curve.

    Args:
        input: probabilities `[rows, 2]`, positive in the last column.
        label: `[rows, 1]`, 0 or 1.
        curve: `ROC`, the only one that fluid computed too.
        num_thresholds: number of bins of the predictions.
        topk: a value other than 1 is warned of; fluid did not read it either.
        slide_steps: number of runs in the second result.

    Returns:
        The area over all runs, over the last ones, and the persistent counts: true and false of the
        last runs, true and false of all.

    Raises:
        ProgramError: another curve.
    """
    if topk != 1:
        warn_no_effect("auc's topk", "the area is that of the last column, as in fluid")
    if curve != "ROC":
        raise mistake(f"auc: the curve is 'ROC', not {curve!r}")
    helper = LayerHelper("auc")
    (x,), (y,) = variables("auc", "input", input), variables("auc", "label", label)
    bins = num_thresholds + 1

    def area(shape: Sequence[int], steps: int) -> tuple[Variable, list[Variable]]:
        names = [unique_name.generate(f"{helper.name}.tmp") for _ in range(2)]
        counts = [helper.global_variable(one, shape, "int64", 0.0) for one in names]
        made, *_ = helper.add(
            {"Predict": x, "Label": y, "StatPos": counts[0], "StatNeg": counts[1]},
            {"AUC": "float64", "StatPosOut": counts[0], "StatNegOut": counts[1]},
            {"curve": "ROC", "num_thresholds": num_thresholds, "slide_steps": steps},
            frozen=True,
        )
        return made, counts

    recent, of_recent = area([(1 + slide_steps) * bins + 1], slide_steps)
    overall, of_all = area([1, bins], 0)
    return overall, recent, [*of_recent, *of_all]
