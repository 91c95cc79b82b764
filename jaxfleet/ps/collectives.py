"""Collectives of trainers, done by a server: what to ask for, and what to make of the answer.

A server reduces what all trainers sent, in their order, or gives them all of it. Whatever else a
collective does is done here, alike on every trainer.
"""

from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator

_REDUCTIONS = frozenset({"sum", "max", "min", "prod", "and", "or", "xor"})


def asked_for(op: Operator, dtype: np.dtype[Any]) -> str:
    """Returns what a server has to do for a collective on arrays of a dtype.

    Raises:
        ProgramError: it is none that trainers can do.
    """
    how = op.type.removeprefix("c_allreduce_")
    if how in _REDUCTIONS:
        return how
    if how == "avg":
        return "sum" if _is_inexact(dtype) else "max"
    if op.type == "c_reducescatter":
        return "sum"
    if op.type in {"c_allgather", "c_alltoall"}:
        return "gather"
    what = f"'{op.type}' is no collective that parameter servers do"
    raise ProgramError(what, op=op, hint="train with mode='collective'")


def finished(op: Operator, answer: np.ndarray, *, trainer: int, trainers: int) -> np.ndarray:
    """Returns a collective's output.

    Args:
        op: the collective.
        answer: of the server; for `gather`, with the trainers along a new axis 0.
        trainer: which trainer this is.
        trainers: how many there are.
    """
    if op.type == "c_allreduce_avg" and _is_inexact(answer.dtype):
        return np.asarray(answer / np.asarray(trainers, answer.dtype), answer.dtype)
    if op.type == "c_reducescatter":
        return np.split(answer, trainers, _axis(op, "axis"))[trainer]
    if op.type == "c_allgather":
        return np.concatenate(list(answer), _axis(op, "axis"))
    if op.type == "c_alltoall":
        parts = [np.split(value, trainers, _axis(op, "axis"))[trainer] for value in answer]
        return np.concatenate(parts, _axis(op, "from_axis"))
    return answer


def _axis(op: Operator, name: str) -> int:
    axis = op.attrs[name]
    assert isinstance(axis, int)
    return axis


def _is_inexact(dtype: np.dtype[Any]) -> bool:
    return np.issubdtype(dtype, np.inexact) or dtype.kind == "V" or dtype.name.startswith("bfloat")
