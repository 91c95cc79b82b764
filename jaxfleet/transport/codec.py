"""Encodes messages as frames, a msgpack header and the bytes of each array, and decodes them.

Received frames are untrusted until `decode` has checked them. Nothing in a frame is executed, and a
size in a header is compared with the limits and with the bytes received before it is used. Frames
that fail a check raise `FrameError`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import msgpack
import numpy as np

from jaxfleet.errors import JaxfleetError
from jaxfleet.transport.messages import PROTOCOL, Kind, Limits, Message, Tensor

Frame: TypeAlias = bytes | memoryview


class FrameError(JaxfleetError, ValueError):
    """A received message is malformed, or a message cannot be encoded.

    Args:
        number: number of the request, if the header could be read that far.
    """

    def __init__(self, what: str, *, number: int = 0, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.number = number


def frame_bytes(frame: Frame) -> int:
    """Returns the size of a frame in bytes."""
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def check_at_most(what: str, size: int, limit: int) -> None:
    """Raises FrameError if a size exceeds its limit."""
    if size > limit:
        raise FrameError(f"{what} is {size}, and may be {limit}", hint="set Limits higher")


_FIELDS = ("v", "kind", "sender", "step", "number", "body", "tensors")
_KINDS = {kind.value: kind for kind in Kind}
_NUMBERS_END = 1 << 63


def unpack_header(frame: Frame, limits: Limits) -> dict[str, Any]:
    """Returns a message's header, whose field values are not yet validated."""
    check_at_most("the header", frame_bytes(frame), limits.max_body_bytes)
    counter = _Counter(limits.max_values)
    try:
        header = msgpack.unpackb(
            frame,
            ext_hook=_no_extensions,
            list_hook=counter.list_hook,
            object_pairs_hook=counter.pairs_hook,
            max_array_len=limits.max_values,
            max_map_len=limits.max_values,
        )
    except FrameError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"the header is not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(header, dict) or header.keys() != set(_FIELDS):
        raise FrameError(f"a header is a map of {', '.join(_FIELDS)}")
    if type(header["v"]) is not int or header["v"] != PROTOCOL:
        what = f"the message is in protocol {header['v']!r:.20}, and this end uses {PROTOCOL}"
        raise FrameError(what, hint="run the same jaxfleet everywhere")
    return header


class _Counter:
    """Counts the values in a header during unpacking, and aborts at the limit."""

    def __init__(self, most: int) -> None:
        self._left = most

    def list_hook(self, values: list[Any]) -> list[Any]:
        self._take(len(values))
        return values

    def pairs_hook(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._take(len(pairs))
        values = dict(pairs)
        if len(values) != len(pairs):
            raise FrameError("a map in the header has a key twice")
        return values

    def _take(self, count: int) -> None:
        self._left -= count + 1
        if self._left < 0:
            raise FrameError("the header holds too many values", hint="set Limits higher")


def _no_extensions(code: int, data: bytes) -> Any:
    raise FrameError(f"the header holds an extension type, {code}, of {len(data)} bytes")


def read_integer(field: str, value: Any, least: int) -> int:
    """Returns an integer field, which must be at least `least`."""
    if type(value) is not int or not least <= value < _NUMBERS_END:
        raise FrameError(f"{field} is a number from {least}, not {value!r:.40}")
    return value


def read_name(field: str, value: Any, limits: Limits) -> str:
    """Returns a text field, limited to `max_name` characters."""
    if not isinstance(value, str):
        raise FrameError(f"{field} is text, not a {type(value).__name__}")
    check_at_most(f"the length of {field}", len(value), limits.max_name)
    return value


def read_kind(value: Any) -> Kind:
    """Returns the kind of a message."""
    kind = _KINDS.get(value) if isinstance(value, str) else None
    if kind is None:
        raise FrameError(f"there is no kind {value!r:.40}")
    return kind


def check_body(body: Any, depth: int) -> None:
    """Rejects a body that is not a map of plain values, or is nested deeper than `depth`."""
    if not isinstance(body, Mapping):
        raise FrameError(f"a body is a map, not a {type(body).__name__}")
    _check_plain(body, depth)


def _check_plain(value: Any, depth: int) -> None:
    if value is None or isinstance(value, str | bool | int | float):
        return
    if depth <= 0:
        raise FrameError("the body is nested too deep")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise FrameError("a key in the body is not text")
        value = value.values()
    elif not isinstance(value, list | tuple):
        raise FrameError(f"the body holds a {type(value).__name__}")
    for entry in value:
        _check_plain(entry, depth - 1)


_LEAST_STEP = -1  # a server without state
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_NARROW = (
    *("bfloat16", "int2", "int4", "uint2", "uint4", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
)
_DTYPES: Mapping[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in ("bool", *_INTEGERS, *_FLOATS)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _NARROW},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # `dtype.name` is slow


def encode(message: Message, *, limits: Limits | None = None) -> list[Frame]:
    """Returns a message's frames; array frames share the arrays' memory.

    An array that is not in C order or not in the wire's byte order is copied.

    Raises:
        FrameError: the message exceeds the limits or contains a value that a header cannot hold.
    """
    limits = limits or Limits()
    check_body(message.body, limits.max_depth)
    arrays = [_in_wire_order(tensor) for tensor in message.tensors]
    header = {
        "v": PROTOCOL,
        "kind": message.kind.value,
        "sender": message.sender,
        "step": message.step,
        "number": message.number,
        "body": dict(message.body),
        "tensors": [
            [tensor.name, _NAMES[array.dtype], tensor.array.shape]
            for tensor, array in zip(message.tensors, arrays, strict=True)
        ],
    }
    try:
        packed: bytes = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a {message.kind.value} message cannot be packed: {error}") from error
    frames: list[Frame] = [packed, *(_memory(array) for array in arrays)]
    _check_sizes(message, frames, limits)
    return frames


def decode(frames: Sequence[Frame], limits: Limits) -> Message:
    """Decodes frames into a message whose arrays are read-only views of the frames.

    Raises:
        FrameError: the frames are malformed or exceed the limits.
    """
    if not 1 <= len(frames) <= limits.max_frames:
        raise FrameError(f"a message has 1 to {limits.max_frames} frames, not {len(frames)}")
    check_at_most(
        "a message", sum(frame_bytes(frame) for frame in frames), limits.max_message_bytes
    )
    header = unpack_header(frames[0], limits)
    number = read_integer("number", header["number"], 0)
    try:
        kind = read_kind(header["kind"])
        check_body(header["body"], limits.max_depth)
        return Message(
            kind=kind,
            sender=read_name("sender", header["sender"], limits),
            step=read_integer("step", header["step"], _LEAST_STEP),
            number=number,
            body=header["body"],
            tensors=_tensors(header["tensors"], frames[1:], limits),
        )
    except FrameError as error:
        error.number = number
        raise


def _in_wire_order(tensor: Tensor) -> np.ndarray:
    array = np.asarray(tensor.array)
    if array.dtype in _NAMES and array.flags.c_contiguous:
        return array
    dtype = _DTYPES.get(array.dtype.name)
    if dtype is None:
        what = f"array '{tensor.name}' has dtype {array.dtype}, which no message carries"
        raise FrameError(what, hint=f"it may be one of {', '.join(_DTYPES)}")
    return np.ascontiguousarray(array, dtype)


def _memory(array: np.ndarray) -> memoryview:
    # As bytes: Python's buffer protocol has no bfloat16.
    return array.reshape(-1).view(np.uint8).data


def _check_sizes(message: Message, frames: Sequence[Frame], limits: Limits) -> None:
    """Rejects a message that the receiver would drop."""
    what = f"a {message.kind.value} message"
    check_at_most(f"{what}: the arrays' number", len(message.tensors), limits.max_tensors)
    check_at_most(f"{what}: its header", frame_bytes(frames[0]), limits.max_body_bytes)
    for tensor, frame in zip(message.tensors, frames[1:], strict=True):
        check_at_most(f"{what}: array '{tensor.name}'", frame_bytes(frame), limits.max_bytes)
    check_at_most(what, sum(frame_bytes(frame) for frame in frames), limits.max_message_bytes)


def _tensors(specs: Any, frames: Sequence[Frame], limits: Limits) -> tuple[Tensor, ...]:
    if not isinstance(specs, list) or len(specs) != len(frames):
        raise FrameError(f"the header does not name the {len(frames)} arrays that came")
    return tuple(_tensor(spec, frame, limits) for spec, frame in zip(specs, frames, strict=True))


def _tensor(spec: Any, frame: Frame, limits: Limits) -> Tensor:
    if not isinstance(spec, list) or len(spec) != 3:
        raise FrameError("an array is described by its name, dtype and shape")
    name = read_name("an array's name", spec[0], limits)
    dtype = _DTYPES.get(spec[1]) if isinstance(spec[1], str) else None
    if dtype is None:
        raise FrameError(f"array '{name}' has dtype {spec[1]!r:.40}, which no message carries")
    shape = _shape(name, spec[2], limits)
    # Zero-size axes count as 1 here: numpy multiplies the other sizes, which may overflow.
    check_at_most(
        f"array '{name}'", math.prod(max(n, 1) for n in shape) * dtype.itemsize, limits.max_bytes
    )
    if frame_bytes(frame) != (expected := math.prod(shape) * dtype.itemsize):
        raise FrameError(f"array '{name}' is {expected} bytes, and {frame_bytes(frame)} came")
    array = np.frombuffer(memoryview(frame).toreadonly(), np.uint8)
    if dtype == np.bool_ and array.size and array.max() > 1:
        raise FrameError(f"array '{name}' is of truth values, and holds others")
    return Tensor(name, array.view(dtype).reshape(shape))


def _shape(name: str, shape: Any, limits: Limits) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > limits.max_rank:
        raise FrameError(f"array '{name}' has a shape of at most {limits.max_rank} sizes")
    return tuple(read_integer(f"a size of '{name}'", size, 0) for size in shape)
