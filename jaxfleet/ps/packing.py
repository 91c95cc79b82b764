r"""Puts the small parts of what is sent into one: each part costs its way through ZeroMQ.

A packed message begins with `\xc1s`, the number of parts and the size of each, and then holds the
bytes of the small ones; the others follow as they are, in order, and have no size here.
"""

import struct
from collections.abc import Sequence

from jaxfleet.ps.frames import Frame, FrameError, frame_bytes

_MARK = b"\xc1s"  # no msgpack begins with c1, so no header does
_COUNT = struct.Struct("<2sI")
_APART = 0xFFFFFFFF  # a part that follows by itself
_MOST_BYTES = 1 << 15  # of a part that is packed
_MOST_PACKED_BYTES = 1 << 18  # of all of them


def pack(parts: Sequence[Frame]) -> Sequence[Frame]:
    """Returns what to send in the place of parts."""
    if len(parts) < 2:
        return parts
    sizes, inner, apart = [], [], []
    left = _MOST_PACKED_BYTES
    for part in parts:
        size = frame_bytes(part)
        if size <= min(_MOST_BYTES, left):
            left -= size
            sizes.append(size)
            inner.append(part)
        else:
            sizes.append(_APART)
            apart.append(part)
    head = _COUNT.pack(_MARK, len(sizes)) + struct.pack(f"<{len(sizes)}I", *sizes)
    return [b"".join((head, *inner)), *apart]


def unpack(parts: Sequence[Frame], *, most: int) -> Sequence[Frame]:
    """Returns the parts that were packed, or what came, where nothing was.

    Args:
        parts: what came.
        most: how many there may be.

    Raises:
        FrameError: the first part does not say what it holds.
    """
    if not parts or bytes(parts[0][:2]) != _MARK:
        return parts
    first, apart = memoryview(parts[0]).toreadonly(), iter(parts[1:])
    sizes = _sizes(first, most)
    if sum(size == _APART for size in sizes) != len(parts) - 1:
        raise FrameError("a packed message does not name the parts that follow it")
    at, found = _COUNT.size + 4 * len(sizes), list[Frame]()
    for size in sizes:
        if size == _APART:
            found.append(next(apart))
            continue
        found.append(first[at : at + size])
        at += size
    if at != frame_bytes(first):
        raise FrameError(f"a packed message of {frame_bytes(first)} bytes says that it has {at}")
    return found


def _sizes(first: memoryview, most: int) -> tuple[int, ...]:
    if frame_bytes(first) < _COUNT.size:
        raise FrameError("a packed message breaks off before the number of its parts")
    _, count = _COUNT.unpack_from(first)
    if not 0 < count <= most or frame_bytes(first) < _COUNT.size + 4 * count:
        raise FrameError(f"a packed message names {count} parts, and may have {most}")
    return struct.unpack_from(f"<{count}I", first, _COUNT.size)
