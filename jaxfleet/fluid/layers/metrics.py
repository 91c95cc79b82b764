"""Layers that tell how good predictions are."""

from collections.abc import Sequence

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.variable import Variable


def accuracy(
    input: Variable,
    label: Variable,
    k: int = 1,
    correct: Variable | None = None,
    total: Variable | None = None,
) -> Variable:
    """Tells which share of rows has its label among the `k` most likely: `[1]`."""
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
        input: probabilities `[rows, 2]`, of which the last column is that of a yes.
        label: `[rows, 1]`, 0 or 1.
        curve: only `ROC`, which is all that fluid computed too.
        num_thresholds: how finely predictions are counted.
        topk: warned of where it is not 1: fluid read it as little.
        slide_steps: how many runs the second result is about.

    Returns:
        The area over all runs, over the last ones, and the counts, which live from run to run:
        right and wrong of the last ones, right and wrong of all.

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
    recent, of_recent = _area(helper, x, y, [(1 + slide_steps) * bins + 1], slide_steps, bins)
    overall, of_all = _area(helper, x, y, [1, bins], 0, bins)
    return overall, recent, [*of_recent, *of_all]


def _area(
    helper: LayerHelper,
    predicted: Variable,
    label: Variable,
    shape: Sequence[int],
    slide_steps: int,
    bins: int,
) -> tuple[Variable, list[Variable]]:
    counts = [
        helper.global_variable(unique_name.generate(f"{helper.name}.tmp"), shape, "int64", 0.0)
        for _ in range(2)
    ]
    area, *_ = helper.add(
        {"Predict": predicted, "Label": label, "StatPos": counts[0], "StatNeg": counts[1]},
        {"AUC": "float64", "StatPosOut": counts[0], "StatNegOut": counts[1]},
        {"curve": "ROC", "num_thresholds": bins - 1, "slide_steps": slide_steps},
        frozen=True,
    )
    return area, counts
