"""Metrics computed in the program: accuracy and AUC."""

from collections.abc import Sequence

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables


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
