"""Layers that compare what was predicted with what is so."""

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.maths import reduce_mean
from jaxfleet.fluid.layers.one_operator import one_operator, variables
from jaxfleet.fluid.variable import Variable


def square_error_cost(input: Variable, label: Variable) -> Variable:
    """Squares the difference, element by element."""
    (x,), (y,) = (
        variables("square_error_cost", "input", input),
        variables("square_error_cost", "label", label),
    )
    helper = LayerHelper("square_error_cost")
    (less,) = helper.add({"X": x, "Y": y}, {"Out": x.dtype}, op_type="elementwise_sub")
    (out,) = helper.add({"X": less}, {"Out": x.dtype}, op_type="square")
    return out


def mse_loss(input: Variable, label: Variable) -> Variable:
    """Averages the squares of all differences: `[1]`."""
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
    """Takes minus the log of the probability of the label: `[..., 1]`.

    Raises:
        TypeError: labels are no whole numbers; or, if soft, no probabilities.
    """
    _check_label("cross_entropy", label, soft=soft_label)
    if soft_label:
        return _cross_entropy(input, label, soft_label, ignore_index)
    return _cross_entropy2(input, label, ignore_index)


def _check_label(layer: str, label: object, *, soft: bool) -> None:
    """Checks the dtype of labels, where they are a variable.

    Raises:
        TypeError: it is another than the layer takes.
    """
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
    """Takes softmax and cross entropy in one: `[..., 1]`.

    Raises:
        TypeError: labels are no whole numbers; or, if soft, no probabilities.
    """
    _check_label("softmax_with_cross_entropy", label, soft=soft_label)
    helper = LayerHelper("softmax_with_cross_entropy")
    (x,) = variables(helper.layer_type, "logits", logits)
    attrs = {
        "soft_label": soft_label,
        "ignore_index": ignore_index,
        "numeric_stable_mode": numeric_stable_mode,
        "axis": axis,
    }
    (y,) = variables(helper.layer_type, "label", label)
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
    """Takes the cross entropy of independent probabilities, given as logits."""


@one_operator("log_loss", Predicted="input", Labels="label", out="Loss")
def log_loss(
    input: Variable, label: Variable, epsilon: float = 1e-4, name: str | None = None
) -> Variable:
    """Takes minus the log of the probability of what is so, for a yes or a no."""


@one_operator("huber_loss", X="input", Y="label", aside={"Residual": ""})
def huber_loss(input: Variable, label: Variable, delta: float) -> Variable:
    """Takes half the square of a difference up to `delta`, and grows evenly beyond it."""


@one_operator("label_smooth", X="label", PriorDist="prior_dist", unused=("dtype",))
def label_smooth(
    label: Variable,
    prior_dist: Variable | None = None,
    epsilon: float = 0.1,
    dtype: str = "float32",
    name: str | None = None,
) -> Variable:
    """Mixes labels with a prior, an even one unless given."""
