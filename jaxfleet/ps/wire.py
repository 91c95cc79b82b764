"""Messages as frames: a msgpack header, then the bytes of each array as they lie in memory.

Whatever comes in is foreign until `decode` has looked at it. Nothing in a frame is run, and no
size that it names is believed before it is compared with the limits and with the bytes that came.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from jaxfleet.ps.frames import Frame, FrameError, check_at_most, frame_bytes
from jaxfleet.ps.header import check_body, read_integer, read_kind, read_name, unpack_header
from jaxfleet.ps.limits import Limits
from jaxfleet.ps.messages import PROTOCOL, Message, Tensor

_LEAST_STEP = -1  # a server without a state
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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # `dtype.name` takes its time


def encode(message: Message, *, limits: Limits | None = None) -> list[Frame]:
    """Returns a message's frames; those of arrays are the arrays' own memory.

    An array that does not lie in C order, or not in the wire's byte order, is copied.

    Raises:
        FrameError: the message is more than the limits let through, or holds what a header cannot.
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
    """Returns the message that the frames are; its arrays lie in the frames, and are read-only.

    Raises:
        FrameError: they are no message, or one beyond the limits.
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
    # As bytes, since Python's buffers know nothing of bfloat16.
    return array.reshape(-1).view(np.uint8).data


def _check_sizes(message: Message, frames: Sequence[Frame], limits: Limits) -> None:
    """Refuses here what the other end would only drop."""
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
    # An axis of size 0 hides no others: numpy multiplies those too, and they may overflow.
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
