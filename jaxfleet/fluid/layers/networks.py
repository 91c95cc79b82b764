"""Layers with parameters, and losses."""

import math
from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.variable import Variable


def fc(
    input: Variable | Sequence[Variable],
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Multiplies by a matrix and adds a bias.

    Args:
        input: one or several, whose products are added.
        size: of the last axis of the result.
        num_flatten_dims: how many axes stay; the others are one.
        param_attr: of the matrix.
        bias_attr: of the bias; False for none.
        act: an activation.
        name: of the layer.
    """
    helper = LayerHelper("fc", name)
    inputs = [input] if isinstance(input, Variable) else list(input)
    products = [_product(helper, x, size, num_flatten_dims, param_attr) for x in inputs]
    made = products[0]
    if len(products) > 1:
        made = helper.output(made.dtype)
        helper.append_op("sum", {"X": products}, {"Out": made})
    made = helper.with_bias(made, bias_attr, size, num_flatten_dims)
    return helper.with_activation(made, act)


def _product(helper: LayerHelper, x: Variable, size: int, axes: int, attr: Any) -> Variable:
    rows = math.prod(x.shape[axes:])
    described = ParamAttr.of(attr) or ParamAttr()
    weight = helper.parameter(described, [rows, size], x.dtype)
    out = helper.output(x.dtype)
    attrs = {"x_num_col_dims": axes, "y_num_col_dims": 1}
    helper.append_op("mul", {"X": x, "Y": weight}, {"Out": out}, attrs)
    return out


def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> Variable:
    """Takes rows of a table `[vocabulary, width]` by number: `[..., width]`."""
    helper = LayerHelper("embedding")
    table = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), size, dtype)
    table.is_distributed = is_distributed
    out = helper.output(dtype)
    padding = -1 if padding_idx is None else padding_idx
    attrs = {
        "is_sparse": is_sparse,
        "is_distributed": is_distributed,
        "remote_prefetch": is_sparse and not is_distributed,
        "padding_idx": padding + size[0] if padding_idx is not None and padding < 0 else padding,
    }
    helper.append_op("lookup_table_v2", {"Ids": input, "W": table}, {"Out": out}, attrs)
    return out


def dropout(
    x: Variable,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Variable:
    """Sets a share of the elements to zero."""
    helper = LayerHelper("dropout", name)
    out, mask = helper.output(x.dtype), helper.output("uint8", stop_gradient=True)
    attrs = {
        "dropout_prob": dropout_prob,
        "is_test": is_test,
        "fix_seed": seed is not None,
        "seed": seed or 0,
        "dropout_implementation": dropout_implementation,
    }
    helper.append_op("dropout", {"X": x}, {"Out": out, "Mask": mask}, attrs)
    return out


def square_error_cost(input: Variable, label: Variable) -> Variable:
    """Squares the difference, element by element."""
    helper = LayerHelper("square_error_cost")
    difference = helper.output(input.dtype)
    helper.append_op("elementwise_sub", {"X": input, "Y": label}, {"Out": difference})
    out = helper.output(input.dtype)
    helper.append_op("square", {"X": difference}, {"Out": out})
    return out


def cross_entropy(
    input: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
) -> Variable:
    """Takes minus the log of the probability of the label: `[..., 1]`."""
    if soft_label:
        helper = LayerHelper("cross_entropy")
        out = helper.output(input.dtype)
        attrs: dict[str, Any] = {"soft_label": True, "ignore_index": ignore_index}
        helper.append_op("cross_entropy", {"X": input, "Label": label}, {"Y": out}, attrs)
        return out
    helper = LayerHelper("cross_entropy2")
    out = helper.output(input.dtype)
    record = helper.output(input.dtype, stop_gradient=True)
    match = helper.output(input.dtype, stop_gradient=True)
    helper.append_op(
        "cross_entropy2",
        {"X": input, "Label": label},
        {"Y": out, "MatchX": match, "XShape": record},
        {"ignore_index": ignore_index},
    )
    return out


def softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Variable | tuple[Variable, Variable]:
    """Takes softmax and cross entropy in one: `[..., 1]`."""
    helper = LayerHelper("softmax_with_cross_entropy")
    made, loss = helper.output(logits.dtype), helper.output(logits.dtype)
    attrs = {
        "soft_label": soft_label,
        "ignore_index": ignore_index,
        "numeric_stable_mode": numeric_stable_mode,
        "axis": axis,
    }
    inputs = {"Logits": logits, "Label": label}
    helper.append_op(helper.layer_type, inputs, {"Softmax": made, "Loss": loss}, attrs)
    return (loss, made) if return_softmax else loss


def accuracy(
    input: Variable,
    label: Variable,
    k: int = 1,
    correct: Variable | None = None,
    total: Variable | None = None,
) -> Variable:
    """Tells which share of rows has its label among the `k` most likely: `[1]`."""
    helper = LayerHelper("accuracy")
    values = helper.output(input.dtype, stop_gradient=True)
    indices = helper.output("int64", stop_gradient=True)
    helper.append_op("top_k", {"X": input}, {"Out": values, "Indices": indices}, {"k": k})
    share = helper.output("float32", stop_gradient=True)
    correct = correct or helper.output("int32", stop_gradient=True)
    total = total or helper.output("int32", stop_gradient=True)
    outputs = {"Accuracy": share, "Correct": correct, "Total": total}
    helper.append_op("accuracy", {"Out": values, "Indices": indices, "Label": label}, outputs)
    return share
