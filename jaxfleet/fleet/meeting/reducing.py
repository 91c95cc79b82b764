"""Reduces what processes gathered: in their order, so that every one has the same to the bit."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.ops.frames import line_of_caller

_MODES: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
Gather = Callable[[np.ndarray[Any, Any]], Sequence[np.ndarray[Any, Any]]]


def reduce_into(output: Any, gather: Gather, given: Any, mode: str) -> None:
    """Writes into `output` what `given` comes to over all processes.

    Args:
        output: an array or a list of the same shape.
        gather: returns what each process gave, this one's included.
        given: an array, or a list of numbers.
        mode: `sum`, `min` or `max`.

    Raises:
        ProgramError: the mode is another, or a shape differs.
        WrongTypeError: the output is neither an array nor a list, or cannot hold the result.
    """
    if mode not in _MODES:
        hint = f"one of {', '.join(_MODES)}"
        raise ProgramError(f"unknown mode: {mode}", source=line_of_caller(), hint=hint)
    array = np.asarray(given)
    _check_output(output, array)
    parts = gather(array)
    for at, part in enumerate(parts):
        if part.shape != array.shape:
            what = f"worker {at} reduces a shape of {part.shape}, and this one {array.shape}"
            raise ProgramError(what, source=line_of_caller(), hint="give the same shape on all")
    result = reduce(_MODES[mode], parts)
    if isinstance(output, np.ndarray):
        np.copyto(output, result, casting="same_kind")
    else:
        output[:] = result.tolist()


def _check_output(output: Any, array: np.ndarray[Any, Any]) -> None:
    """Refuses what the result cannot be written to, before anybody waits."""
    source = line_of_caller()
    if not isinstance(output, np.ndarray | list):
        what = f"the output is of type {type(output).__name__}, not an array or a list"
        raise WrongTypeError(what, source=source, hint="such as numpy.zeros_like(input)")
    if array.dtype.kind not in "biuf":
        what = f"the input is {array.dtype}, which is no kind of number"
        raise WrongTypeError(what, source=source, hint="give an array, or a list of numbers")
    if np.shape(output) != array.shape:
        what = f"the input is of shape {array.shape}, and the output of shape {np.shape(output)}"
        raise ProgramError(what, source=source)
    if isinstance(output, np.ndarray) and not np.can_cast(array.dtype, output.dtype, "same_kind"):
        what = f"the input is {array.dtype}, which an output of {output.dtype} cannot hold"
        raise WrongTypeError(what, source=source)
