"""What trainers ask for and send by rows: some of a slice, in the place of all of it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxfleet.ps.messages import Message
from jaxfleet.ps.row_gradients import fitting_gradients, has_rows, rows_misfit
from jaxfleet.ps.server.desk import RefusedError, Request
from jaxfleet.ps.server.plan import ServerPlan


def with_fitting_gradients(request: Request, plan: ServerPlan) -> Request:
    """Returns a push whose gradients are as blocks take them: whole, or rows.

    Raises:
        RefusedError: rows of a gradient do not fit it.
    """
    message = request.message
    if not has_rows(message.tensors):
        return request
    types = {name: merge.type for name, merge in plan.merges.items()}
    tensors, misfit = fitting_gradients(message.tensors, types, plan.by_rows)
    if misfit is not None:
        raise RefusedError("bad_message", misfit)
    return replace(request, message=replace(message, tensors=tensors))


def rows_asked_for(message: Message) -> Mapping[str, np.ndarray]:
    """Returns the numbers of the rows that a pull asks for, by slice; all of a slice without."""
    return {tensor.name: tensor.array for tensor in message.tensors}


def check_rows(message: Message, plan: ServerPlan) -> None:
    """Refuses a pull of rows that a slice does not have.

    Raises:
        RefusedError: it is one.
    """
    for name, numbers in rows_asked_for(message).items():
        held = plan.types.get(name)
        misfit = "it is not held here" if held is None else rows_misfit(numbers, held)
        if misfit is not None:
            raise RefusedError("bad_message", f"'{name}': {misfit}")
