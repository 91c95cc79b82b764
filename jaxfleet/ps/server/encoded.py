"""Gives gradients that came compressed back their elements, before anybody looks at them."""

from dataclasses import replace

from jaxfleet.ps.compression import decoded
from jaxfleet.ps.messages import Tensor
from jaxfleet.ps.server.desk import RefusedError, Request
from jaxfleet.ps.server.plan import ServerPlan


def in_full(request: Request, plan: ServerPlan) -> Request:
    """Returns a push whose gradients are all arrays of their elements.

    Raises:
        RefusedError: one is not encoded as the message says, or is none of the program's.
    """
    message = request.message
    how = message.body.get("encoded", {})
    if not how:
        return request
    arrays = {tensor.name: tensor.array for tensor in message.tensors}
    shapes = {name: merge.type.shape for name, merge in plan.merges.items() if name in arrays}
    try:
        if not isinstance(how, dict):
            raise ValueError("it does not say how")  # noqa: TRY004, TRY301  # as all else here
        found = decoded(arrays, how, shapes)
    except ValueError as error:
        what = f"trainer {request.trainer}'s encoded gradients of step {message.step}: {error}"
        raise RefusedError("bad_message", what) from error
    tensors = tuple(Tensor(name, array) for name, array in found.items())
    return replace(request, message=replace(message, tensors=tensors))
