"""Operators of any program: `assign`, `fetch`, runtime checks, release of memory.

`to_host` and `to_device` move a value between executables. In a program that runs as one executable
they pass their inputs on.
"""

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ops.registry import Array, Context, register_op


@register_op("assign")
def assign(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Copies its inputs to its outputs."""
    return [jnp.asarray(value) for value in inputs]


@register_op("fetch")
def fetch(_: Context, __: Operator, ___: Sequence[Array]) -> Sequence[Array]:
    """Marks the results of a step other than its state; computes nothing."""
    return []


_RAISED = re.compile(r"\bProgramError: (.*)")


def failed_check(error: RuntimeError) -> ProgramError | None:
    """Returns the error of a check in a computation, of which jax keeps the text, or None."""
    found = _RAISED.search(str(error))
    return ProgramError(found.group(1)) if found is not None else None


@register_op("raise_if")
def _raise_if(_: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    """Returns all inputs but the first two, if the first is 0.

    Otherwise it raises the message whose number is the second input. Nothing is raised if no result
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


@register_op("cut")
def cut(_: Context, __: Operator, ___: Sequence[Array]) -> Sequence[Array]:
    """Ends an executable: the operators after it are compiled separately from those before."""
    return []


@register_op("delete_var")
def delete_var(_: Context, __: Operator, ___: Sequence[Array]) -> Sequence[Array]:
    """Marks its inputs as no longer read."""
    return []


@register_op("to_host")
def to_host(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Copies a value to pinned memory of the host."""
    return inputs


@register_op("to_device")
def to_device(_: Context, __: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Copies a value from pinned memory of the host to the device's."""
    return inputs
