"""Sends a large message in pieces, and puts it together in memory of its own.

ZeroMQ hands out a message when all of it is there, in memory that it takes from the system each
time: for 64 MB on loopback, clearing those pages took longer than moving the bytes. Pieces of
1 MB use the same memory again and again, and what is put together from them is aligned as XLA
wants it. Measured on two cores: 3.1 GB/s instead of 1.1; at 8 MB it is the other way about.

A large message is an opening, which holds the size of each frame, and then pieces of the frames, in
order. A piece never spans two frames. So nothing that is sent as one is larger than 16 MB.
"""

import struct
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from jaxfleet.ps.aligned import aligned_empty
from jaxfleet.ps.frames import Frame, FrameError, frame_bytes
from jaxfleet.ps.limits import Limits

CHUNK_BYTES = 1 << 20
WHOLE_BYTES = 16 << 20  # a message up to this goes in one

_OPENING, _PIECE = b"\xc1o", b"\xc1p"  # no msgpack begins with c1, so no header does


def split(frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
    """Yields the parts of what is to be sent, one after the other."""
    if sum(frame_bytes(frame) for frame in frames) <= WHOLE_BYTES:
        yield frames
        return
    sizes = [frame_bytes(frame) for frame in frames]
    yield [_OPENING + struct.pack(f"<{len(sizes)}Q", *sizes)]
    for frame in frames:
        memory = memoryview(frame)
        for start in range(0, len(memory), CHUNK_BYTES):
            yield [_PIECE, memory[start : start + CHUNK_BYTES]]


class PieceError(FrameError):
    """A piece of a message came that is not the next one."""


class Joiner:
    """Puts together what one connection sends."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sizes: deque[int] = deque()  # of the frames that have not begun
        self._frames: list[np.ndarray] = []
        self._filled = 0  # bytes of the last of them

    @property
    def busy(self) -> bool:
        """Whether a message has begun, and has not ended."""
        return bool(self._sizes or self._frames)

    def add(self, parts: Sequence[Frame]) -> Sequence[Frame] | None:
        """Takes the next parts; returns a message's frames when they are all there.

        What does not follow on what came before begins anew: a connection that broke off may go
        on in the middle, and of that pieces without an opening are left.

        Raises:
            FrameError: an opening names more than the limits let through.
            PieceError: a piece is not the next one of its message.
        """
        mark = bytes(parts[0][:2]) if parts else b""
        if mark == _PIECE:
            return self._add_piece(parts)
        self._forget()
        if mark != _OPENING:
            return parts
        self._sizes.extend(self._opening(parts))
        return self._next()

    def _opening(self, parts: Sequence[Frame]) -> tuple[int, ...]:
        count, left_over = divmod(frame_bytes(parts[0]) - len(_OPENING), 8)
        if len(parts) != 1 or left_over or not 0 < count <= self._limits.max_parts:
            raise FrameError("a large message opens with the size of each of its frames")
        sizes = struct.unpack(f"<{count}Q", parts[0][len(_OPENING) :])
        header_bytes, *array_bytes = sizes
        if (
            header_bytes > self._limits.max_body_bytes
            or max(array_bytes, default=0) > self._limits.max_bytes
            or sum(sizes) > self._limits.max_message_bytes
        ):
            what = f"a message of {sum(sizes)} bytes is too large"
            raise FrameError(what, hint="set Limits higher")
        return sizes

    def _add_piece(self, parts: Sequence[Frame]) -> Sequence[Frame] | None:
        if not self._frames or len(parts) != 2:
            self._forget()
            raise PieceError("a piece of a message came without what goes before it")
        memory, piece = self._frames[-1], parts[1]
        size = frame_bytes(piece)
        if size != min(CHUNK_BYTES, memory.size - self._filled):
            self._forget()
            raise PieceError(f"a piece of a message has {size} bytes, which is not its size")
        memory[self._filled : self._filled + size] = np.frombuffer(piece, np.uint8)
        self._filled += size
        return self._next()

    def _next(self) -> Sequence[Frame] | None:
        """Goes on to the next frame where one is full, and returns all where it was the last."""
        while not self._frames or self._filled == self._frames[-1].size:
            if not self._sizes:
                frames = [frame.data.toreadonly() for frame in self._frames]
                self._forget()
                return frames
            self._frames.append(_aligned(self._sizes.popleft()))
            self._filled = 0
        return None

    def _forget(self) -> None:
        self._sizes.clear()
        self._frames, self._filled = [], 0


def _aligned(size: int) -> np.ndarray:
    try:
        # Its pages come as they are written to: a size that is only claimed costs nothing.
        return aligned_empty((size,), np.dtype(np.uint8))
    except MemoryError as error:
        raise FrameError(f"there is no memory for an array of {size} bytes") from error
