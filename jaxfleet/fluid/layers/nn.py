"""Fully connected layers, embeddings (also of a pslib job's tables), and dropout."""

import math
import numbers
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.program import default_startup_program
from jaxfleet.fluid.framework.types import dtype_name
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.param_attr import ParamAttr


@dataclass(frozen=True)
class FleetRows:
    """Usage of the rows of a table that `fleet_embedding` assigned to a job."""

    click_name: str  # the variable that marks clicked samples
    scale_sparse_grad: bool = True  # multiply gradients of rows by the batch's samples
    counts: bool = False  # rows begin with shows and clicks; set by `minimize`


_CURRENT: ContextVar[FleetRows | None] = ContextVar("fleet_rows", default=None)


@contextmanager
def fleet_embedding(click_name: str, scale_sparse_grad: bool = True) -> Iterator[None]:
    """Makes every `embedding` within the `with` a table of the job, by the parameter's name.

    A script's layers thus need no change. A table grows with its keys, whatever `size` is; a row is
    created at its key's first look-up, and key 0 is padding unless `padding_idx` is given.

    `click_name` is the variable that marks clicked samples, for rows that begin with shows and
    clicks. `scale_sparse_grad` multiplies gradients of rows by the batch's samples, to undo the
    division in a loss that is a mean.
    """
    check_type(click_name, "click_name", str)
    check_type(scale_sparse_grad, "scale_sparse_grad", bool)
    token = _CURRENT.set(FleetRows(click_name, scale_sparse_grad))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_rows() -> FleetRows | None:
    """Usage of rows looked up here; None outside `fleet_embedding`."""
    return _CURRENT.get()


def named_table(param_attr: Any) -> ParamAttr:
    """The attribute of a table of the job, which must be named, since servers use the name."""
    described = ParamAttr.of(param_attr)
    if described is None or not described.name:
        what = "a table in fleet_embedding has no name, by which the job's servers know it"
        raise mistake(what, "param_attr=fluid.ParamAttr(name='user')")
    return described


def fc(
    input: Variable | Sequence[Variable],
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Fully connected layer: multiplies by a matrix and adds a bias.

    Several inputs have a matrix each, and their products are summed. `num_flatten_dims` leading
    axes are kept, all but the last for -1; the others are flattened. There is no bias if
    `bias_attr` is False.
    """
    helper = LayerHelper("fc", name)
    inputs = variables("fc", "input", input)
    axes = num_flatten_dims if num_flatten_dims != -1 else len(inputs[0].shape) - 1
    attrs = _one_each(param_attr, len(inputs))
    products = [
        _product(helper, x, size, axes, attr) for x, attr in zip(inputs, attrs, strict=True)
    ]
    made = products[0]
    if len(products) > 1:
        (made,) = helper.add({"X": products}, {"Out": made.dtype}, op_type="sum")
    made = helper.with_bias(made, bias_attr, size, axes)
    return helper.with_activation(made, act)


def _one_each(attr: Any, count: int) -> list[Any]:
    """The attribute of each matrix, from one for all or a list."""
    if not isinstance(attr, list | tuple):
        return [attr] * count
    if len(attr) != count:
        raise mistake(f"fc: {count} inputs have {len(attr)} param_attr", hint="one, or as many")
    return list(attr)


def _product(helper: LayerHelper, x: Variable, size: int, axes: int, attr: Any) -> Variable:
    if not 0 < axes < len(x.shape):
        what = f"fc: num_flatten_dims {axes} leaves no axis of {list(x.shape)} to multiply"
        raise mistake(what)
    if min(x.shape[axes:]) < 0:
        raise mistake(f"fc: the sizes of '{x.name}' from axis {axes} on are not all known")
    if not isinstance(size, numbers.Integral) or size < 1:
        raise mistake(f"fc: size is {size!r}", "how many columns it makes: at least 1")
    described = ParamAttr.of(attr) or ParamAttr()
    weight = helper.parameter(described, [math.prod(x.shape[axes:]), size], x.dtype)
    attrs = {"x_num_col_dims": axes, "y_num_col_dims": 1}
    (out,) = helper.add({"X": x, "Y": weight}, {"Out": x.dtype}, attrs, op_type="mul")
    return out


def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: Any = "float32",
) -> Variable:
    """Looks up rows of a table `[vocabulary, width]`: of `[..., 1]`, `[..., width]`.

    Only the looked-up rows have gradients if `is_sparse`; the table is on servers if
    `is_distributed`. The row `padding_idx`, negative from the end, is and stays zero.
    """
    return rows_of_table("lookup_table", input, size, is_sparse, is_distributed, padding_idx,
                         param_attr, dtype)  # fmt: skip


def rows_of_table(
    op_type: str,
    input: Variable,
    size: Sequence[int],
    is_sparse: bool,
    is_distributed: bool,
    padding_idx: int | None,
    param_attr: Any,
    dtype: Any,
) -> Variable:
    """Adds a table and the operator that looks up its rows."""
    (ids,) = variables("embedding", "input", input)
    helper, of_fleet = LayerHelper("embedding"), current_rows()
    if of_fleet is not None:
        param_attr, is_sparse, is_distributed = named_table(param_attr), True, True
        padding_idx = 0 if padding_idx is None else padding_idx
    table = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), size, dtype_name(dtype))
    if of_fleet is not None:
        table.block.program._fleet_rows[table.name] = of_fleet
    table.is_distributed = is_distributed
    begun = default_startup_program().global_block().var(table.name)
    if isinstance(begun, Parameter):
        begun.is_distributed = is_distributed  # also on the startup program's parameter
    padding = -1 if padding_idx is None else padding_idx
    attrs = {
        "is_sparse": is_sparse,
        "is_distributed": is_distributed,
        "remote_prefetch": is_sparse and not is_distributed,
        "padding_idx": padding + size[0] if padding_idx is not None and padding < 0 else padding,
    }
    inputs = {"Ids": ids, "W": table}
    (out,) = helper.add(inputs, {"Out": table.dtype}, attrs, op_type=op_type)
    return out


def dropout(
    x: Variable,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Variable:
    """Sets a share of the elements to zero; of none if `is_test`.

    The mask is new in each run unless `seed` fixes it. `dropout_implementation` is
    `downgrade_in_infer`, which scales by the kept share in test, or `upscale_in_train`, by its
    inverse in training.

    Raises:
        ProgramError: the share or the implementation is invalid.
    """
    if dropout_implementation not in {"downgrade_in_infer", "upscale_in_train"}:
        raise mistake(
            f"dropout: there is no implementation {dropout_implementation!r}",
            hint="downgrade_in_infer or upscale_in_train",
        )
    if not 0 <= dropout_prob <= 1:
        raise mistake(f"dropout: a share is between 0 and 1, not {dropout_prob}")
    (given,) = variables("dropout", "x", x)
    helper = LayerHelper("dropout", name)
    attrs = {
        "dropout_prob": dropout_prob,
        "is_test": is_test,
        "fix_seed": seed is not None,
        "seed": seed or 0,
        "dropout_implementation": dropout_implementation,
    }
    out, mask = helper.add({"X": given}, {"Out": given.dtype, "Mask": "uint8"}, attrs)
    mask.stop_gradient = True
    return out
