"""Checks at run time: an operator that hands its inputs on, or raises."""

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ops.registry import Array, Context, register_op

_RAISED = re.compile(r"\bProgramError: (.*)")


def failed_check(error: RuntimeError) -> ProgramError | None:
    """Returns what a check raised inside a computation, of which jax keeps the text, or None."""
    found = _RAISED.search(str(error))
    return ProgramError(found.group(1)) if found is not None else None


@register_op("raise_if")
def _raise_if(_: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    """Returns all inputs but the first two, unless the first is not 0.

    Then it raises the message that the second is the number of. Nothing is raised where no result
    is read.
    """
    fails, number, *values = args
    messages = op.attrs["messages"]
    assert isinstance(messages, tuple)
    held = tuple(map(jnp.asarray, values))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held]

    def failed(index: Any) -> NoReturn:
        raise ProgramError(str(messages[int(index)]), source=op.source)

    def stop() -> tuple[Array, ...]:
        return tuple(jax.pure_callback(failed, types, number))

    return list(lax.cond(jnp.asarray(fails) != 0, stop, lambda: held))
