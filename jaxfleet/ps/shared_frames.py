r"""Puts the large frames of a message into memory that the receiver sees, and finds them there.

What is sent in their place is a first frame that says where each is: `\xc1m`, then a fixed record
for each frame of the message, of size 0 for those that travel in it. On one machine an array is
then copied once on its way, instead of into the kernel and out of it.
"""

import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxfleet.ps.frames import Frame, FrameError, frame_bytes
from jaxfleet.ps.limits import Limits
from jaxfleet.ps.shared_arena import (
    ARENA_BYTES,
    FLAGS,
    HEADER_BYTES,
    MOST_ARENAS,
    NAME,
    TOKEN_BYTES,
    Block,
    Lender,
    flags_of,
)

_MARK = b"\xc1m"  # no msgpack begins with c1, so no header does
_RECORD = struct.Struct(f"<II{TOKEN_BYTES}sIQQ")
_NOT_SHARED = bytes(_RECORD.size)
_LEAST_BYTES = 1 << 16  # a smaller frame costs less in the message
_MOST_MAPPED = 64  # of all peers
_SEALED = fcntl.F_SEAL_SHRINK


def place(
    frames: Sequence[Frame], lender: Lender, *, sources: Sequence[np.ndarray] = ()
) -> Sequence[Frame]:
    """Returns what to send in the place of a message's frames; the same where nothing is shared.

    Args:
        frames: a header, and one for each array.
        lender: of the memory.
        sources: the arrays, where they never change: several peers then share one copy.
    """
    known: list[np.ndarray | None] = [None, *sources] if sources else [None] * len(frames)
    blocks = [
        lender.lend(memoryview(frame), source) if frame_bytes(frame) >= _LEAST_BYTES else None
        for frame, source in zip(frames, known, strict=True)
    ]
    if not any(blocks):
        return frames
    first = _MARK + b"".join(_NOT_SHARED if block is None else _packed(block) for block in blocks)
    return [first, *(b"" if block else frame for block, frame in zip(blocks, frames, strict=True))]


def is_placed(parts: Sequence[Frame]) -> bool:
    """Tells whether parts are what `place` made of a message."""
    return bool(parts) and bytes(parts[0][:2]) == _MARK


def _packed(block: Block) -> bytes:
    return _RECORD.pack(block.pid, block.fd, block.token, block.flag, block.start, block.size)


@dataclass(frozen=True)
class _Mapped:
    """An arena that is mapped here, and the peer that named it first."""

    memory: np.ndarray
    peer: object


class Borrower:
    """Finds frames in the memory of other processes of this machine.

    A peer has as many arenas mapped as a lender ever has, each of the one size that there is: the
    oldest is let go of where it names another.

    Args:
        limits: how much a message may hold.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._mapped: dict[bytes, _Mapped] = {}  # by token

    @property
    def mapped_bytes(self) -> int:
        """How much memory of other processes is mapped."""
        return len(self._mapped) * ARENA_BYTES

    def find(self, parts: Sequence[Frame], peer: object = None) -> Sequence[Frame]:
        """Returns a message's frames; what nobody uses any more goes back to its lender.

        Args:
            parts: what came.
            peer: the connection that it came on.

        Raises:
            FrameError: the first part does not say where they are.
        """
        records, frames = memoryview(parts[0])[len(_MARK) :], parts[1:]
        count = len(frames)
        if not 0 < count <= self._limits.max_frames or len(records) != count * _RECORD.size:
            raise FrameError("a message does not say where each of its frames is")
        return [
            self._found(Block(*_RECORD.unpack_from(records, at * _RECORD.size)), frame, peer)
            for at, frame in enumerate(frames)
        ]

    def _found(self, block: Block, frame: Frame, peer: object) -> Frame:
        if not block.size:
            return frame
        if frame_bytes(frame):
            raise FrameError("a frame is in a message and in shared memory too")
        fits = HEADER_BYTES <= block.start <= ARENA_BYTES - block.size and block.flag < FLAGS
        if not fits or block.size > self._limits.max_bytes:
            raise FrameError("a frame lies outside of the memory that is shared")
        known = self._mapped.get(block.token)
        memory = self._map(block, peer) if known is None else known.memory
        lent = memory[block.start : block.start + block.size]
        # Whatever is made of it keeps this very array, and so the block.
        ended = weakref.finalize(lent, _give_back, flags_of(memory), block.flag, os.getpid())
        ended.atexit = False
        return lent.data.toreadonly()

    def _map(self, block: Block, peer: object) -> np.ndarray:
        try:
            memory = _mapped(f"/proc/{block.pid}/fd/{block.fd}")
        except (OSError, ValueError) as error:
            raise FrameError(f"memory of process {block.pid} cannot be shared: {error}") from error
        if memory[:TOKEN_BYTES].tobytes() != block.token:
            raise FrameError(f"memory of process {block.pid} is not what a message says it is")
        of_peer = [token for token, one in self._mapped.items() if one.peer == peer]
        if len(of_peer) >= MOST_ARENAS:
            del self._mapped[of_peer[0]]
        elif len(self._mapped) >= _MOST_MAPPED:
            del self._mapped[next(iter(self._mapped))]
        self._mapped[block.token] = _Mapped(memory, peer)
        return memory


def _mapped(path: str) -> np.ndarray:
    """Maps an arena. What is no arena is not even opened: a sender may name anything."""
    if not str(Path(path).readlink()).startswith(f"/memfd:{NAME}"):
        raise ValueError("it is no memory that jaxfleet shares")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        sealed, found = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALED, os.fstat(fd)
        if not sealed or found.st_size != ARENA_BYTES:
            raise ValueError("it has another size, or may get one")
        if found.st_uid != os.geteuid():  # root may open what is another user's
            raise ValueError("it is another user's")
        return np.frombuffer(mmap.mmap(fd, ARENA_BYTES), np.uint8)
    finally:
        os.close(fd)


def _give_back(flags: np.ndarray, flag: int, borrower: int) -> None:
    """Clears a flag. A copy of the process, made by a fork, has borrowed nothing itself."""
    if os.getpid() == borrower:
        flags[flag] = 0
