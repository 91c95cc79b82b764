"""Writes what processes swap as bytes, and reads it: data alone, never code."""

from typing import Any

import msgpack
import numpy as np

from jaxfleet.errors import WrongTypeError
from jaxfleet.ops.frames import line_of_caller

_ARRAY, _TUPLE = 1, 2


def pack(value: Any) -> bytes:
    """Writes None, numbers, text, bytes, arrays, and lists, tuples and dicts of them.

    >>> unpack(pack({"a": (1, 2.5), "b": [None, "c"]}))
    {'a': (1, 2.5), 'b': [None, 'c']}

    Raises:
        WrongTypeError: something in it is of another type.
    """
    try:
        packed = msgpack.packb(value, default=_extended, strict_types=True)
    except (OverflowError, ValueError) as error:
        what = f"a value cannot be sent to other processes: {error}"
        raise WrongTypeError(what, source=line_of_caller()) from error
    return bytes(packed)


def unpack(data: bytes) -> Any:
    """Reads what `pack` wrote."""
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


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
