"""Layers that look rows up in the tables of a pslib job, while a `with` lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.param_attr import ParamAttr


@dataclass(frozen=True)
class FleetRows:
    """How a table's rows are used that `fleet_embedding` made a job's.

    Attributes:
        click_name: the variable that tells which samples were clicked.
        scale_sparse_grad: gradients of rows are multiplied by the batch's samples.
        counts: rows begin with how often a key was shown and clicked; `minimize` finds out.
    """

    click_name: str
    scale_sparse_grad: bool = True
    counts: bool = False


_CURRENT: ContextVar[FleetRows | None] = ContextVar("fleet_rows", default=None)


@contextmanager
def fleet_embedding(click_name: str, scale_sparse_grad: bool = True) -> Iterator[None]:
    """Makes every `embedding` within the `with` one of the job's tables, by the parameter's name.

    So a script's layers stay as they are. A table has as many rows as there are keys, whatever
    `size` says; a row begins when its key is first looked up, and key 0 is padding unless
    `padding_idx` says another.

    Args:
        click_name: the variable that tells which samples were clicked, for rows that begin with
            their shows and clicks.
        scale_sparse_grad: multiply gradients of rows by the samples of the batch, by which a loss
            that is a mean has divided them.

    Raises:
        TypeError: an argument is of another type.
    """
    check_type(click_name, "click_name", str)
    check_type(scale_sparse_grad, "scale_sparse_grad", bool)
    token = _CURRENT.set(FleetRows(click_name, scale_sparse_grad))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_rows() -> FleetRows | None:
    """Returns how rows are used that are looked up here; None where layers mean what they say."""
    return _CURRENT.get()


def named_table(param_attr: Any) -> ParamAttr:
    """Returns what a script says of a table that is the job's.

    Raises:
        ProgramError: it has no name, by which servers know the table.
    """
    described = ParamAttr.of(param_attr)
    if described is None or not described.name:
        what = "a table in fleet_embedding has no name, by which the job's servers know it"
        raise mistake(what, "param_attr=fluid.ParamAttr(name='user')")
    return described
