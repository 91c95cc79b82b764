"""Exchanged values as plain bytes, never code, and their reduction in rank order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import msgpack
import numpy as np

from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.ops.user_frames import line_of_caller

_ARRAY, _TUPLE = 1, 2


def pack(value: Any) -> bytes:
    """Serializes None, numbers, text, bytes, arrays, and lists, tuples and dicts of them.

    >>> unpack(pack({"a": (1, 2.5), "b": [None, "c"]}))
    {'a': (1, 2.5), 'b': [None, 'c']}
    """
    try:
        packed = msgpack.packb(value, default=_extended, strict_types=True)
    except (OverflowError, ValueError) as error:
        what = f"a value cannot be sent to other processes: {error}"
        raise WrongTypeError(what, source=line_of_caller()) from error
    return bytes(packed)


def unpack(data: bytes) -> Any:
    """Reverses `pack`."""
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


def unpack_at(what: str, packed: Sequence[bytes], names: Iterable[str], where: str) -> list[Any]:
    """Returns the values in `pack([place, value])` of each process; all must be at one place.

    Raises:
        ProgramError: a process gathers for another purpose.
    """
    given = [unpack(each) for each in packed]
    for name, (other, _) in zip(names, given, strict=True):
        if other != what:
            message = f"{name} is at {other}, and this process at {what}: {where}"
            raise ProgramError(message, hint="all processes of a group gather in the same order")
    return [value for _, value in given]


def _extended(value: Any) -> msgpack.ExtType:
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        described = [array.dtype.str, list(array.shape), array.tobytes()]
        return msgpack.ExtType(_ARRAY, pack(described))
    what = f"a value of type {type(value).__name__} cannot be sent to other processes"
    hint = "send None, numbers, text, bytes, arrays, or lists, tuples and dicts of them"
    raise WrongTypeError(what, source=line_of_caller(), hint=hint)


def _restored(code: int, data: bytes) -> Any:
    inner = unpack(data)
    if code == _TUPLE:
        return tuple(inner)
    dtype, shape, raw = inner
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()


_MODES: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
Gather = Callable[[np.ndarray[Any, Any]], Sequence[np.ndarray[Any, Any]]]


def reduce_into(output: Any, gather: Gather, given: Any, mode: str) -> None:
    """Writes the reduction of `given` over all processes into `output`.

    Raises:
        ProgramError: the mode is unknown, or a shape differs.
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
    """Rejects an output that cannot take the result, before any process waits."""
    source = line_of_caller()
    if not isinstance(output, np.ndarray | list):
        what = f"the output is of type {type(output).__name__}, not an array or a list"
        raise WrongTypeError(what, source=source, hint="such as numpy.zeros_like(input)")
    if array.dtype.kind not in "biuf":
        what = f"the input is {array.dtype}, which is not a kind of number"
        raise WrongTypeError(what, source=source, hint="give an array, or a list of numbers")
    if np.shape(output) != array.shape:
        what = f"the input is of shape {array.shape}, and the output of shape {np.shape(output)}"
        raise ProgramError(what, source=source)
    if isinstance(output, np.ndarray) and not np.can_cast(array.dtype, output.dtype, "same_kind"):
        what = f"the input is {array.dtype}, which an output of {output.dtype} cannot hold"
        raise WrongTypeError(what, source=source)
