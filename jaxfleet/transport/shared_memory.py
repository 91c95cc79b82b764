r"""Large frames in shared memory, between processes of one machine and one user.

The sender copies a large frame into an arena that the receiver maps, so on one machine an array is
copied once in transit instead of into the kernel and out of it. Instead of a message's frames it
sends a first frame with their locations: `\xc1m`, then a fixed record for each frame, of size 0 for
those that travel in the message.

An arena is a sealed memfd: it has no name in the file system, so no file is left behind, and it
cannot shrink under a process that maps it. It begins with a token, which distinguishes it from
another with the same process and file number, and with a flag for each borrower of a block. The
lender sets a flag and sends the location of the block; the borrower clears the flag once the block
is unused. Neither waits for the other: while no block is free, arrays travel in messages.
"""

import fcntl
import mmap
import os
import secrets
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxfleet.transport.codec import Frame, FrameError, frame_bytes
from jaxfleet.transport.messages import Limits

TOKEN_BYTES = 16
FLAGS = 4096
HEADER_BYTES = 4096 + FLAGS
ARENA_BYTES = 512 << 20  # pages are allocated on first write
NAME = "jaxfleet"

_ALIGNMENT = 4096
_LONGEST_LOAN_S = 30.0  # the borrower of an older loan may be dead
MOST_ARENAS = 4  # per lender
_LONGEST_READ_S = 600.0  # after this, a sent block has been read or never will be


@dataclass(frozen=True)
class Block:
    """Location of an array, for one borrower."""

    pid: int  # the lender's process
    fd: int  # of the arena, in that process
    token: bytes
    flag: int  # index of the borrower's flag
    start: int  # bytes from the beginning of the arena
    size: int


class Lender:
    """Lends memory to processes of this machine."""

    def __init__(self) -> None:
        self._arenas: list[_Arena] = []

    def lend(self, memory: memoryview, source: np.ndarray | None = None) -> Block | None:
        """Copies bytes into an arena that the borrower maps; returns None if it is full.

        A killed borrower returns nothing, so a very old loan makes the lender create a new arena, a
        few times. The old ones remain for blocks in flight.

        `source` is the immutable array that owns the bytes, if any: a block that is already lent is
        shared with further borrowers instead of copied.
        """
        if len(memory) > ARENA_BYTES - HEADER_BYTES:
            return None
        found = self._arenas[-1].lend(memory, source) if self._arenas else None
        if found is None and self._may_grow():
            self._arenas.append(_Arena())
            found = self._arenas[-1].lend(memory, source)
        return found

    def close(self) -> None:
        """Releases the memory; processes that have mapped it keep it."""
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()

    def _may_grow(self) -> bool:
        if not self._arenas:
            return True
        now = time.monotonic()
        while len(self._arenas) > 1 and self._arenas[0].lent_at < now - _LONGEST_READ_S:
            self._arenas.pop(0).close()
        stuck = self._arenas[-1].oldest_loan_s() > _LONGEST_LOAN_S
        return stuck and len(self._arenas) < MOST_ARENAS


@dataclass
class _Loan:
    """A block, and the flags of its borrowers."""

    start: int
    end: int
    since: float
    flags: list[int] = field(default_factory=list)


class _Arena:
    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, ARENA_BYTES)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = np.frombuffer(mmap.mmap(self._fd, ARENA_BYTES), np.uint8)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._memory[:TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)
        self._flags = flags_of(self._memory)
        self._free = deque(range(FLAGS))
        self._loans: list[_Loan] = []  # sorted by start
        self._by_source: dict[int, tuple[weakref.ref[np.ndarray], _Loan]] = {}
        self.lent_at = time.monotonic()

    def lend(self, memory: memoryview, source: np.ndarray | None) -> Block | None:
        if not self._free:
            self._take_back()
        if not self._free:
            return None
        loan = self._lent_already(source)
        if loan is None:
            self._take_back()
            loan = self._new_loan(memory)
        if loan is None:
            return None
        if source is not None:
            self._by_source[id(source)] = weakref.ref(source), loan
        flag = self._free.popleft()
        self._flags[flag] = 1
        loan.flags.append(flag)
        self.lent_at = time.monotonic()
        return Block(os.getpid(), self._fd, self._token, flag, loan.start, len(memory))

    def _take_back(self) -> None:
        """Collects the flags that borrowers have cleared."""
        for loan in self._loans:
            self._free.extend(flag for flag in loan.flags if not self._flags[flag])
            loan.flags = [flag for flag in loan.flags if self._flags[flag]]
        self._loans = [loan for loan in self._loans if loan.flags]
        self._by_source = {at: it for at, it in self._by_source.items() if it[1].flags}

    def _lent_already(self, source: np.ndarray | None) -> _Loan | None:
        """Returns the outstanding loan of this source, if any."""
        known = self._by_source.get(id(source))
        return known[1] if known is not None and known[0]() is source else None

    def _new_loan(self, memory: memoryview) -> _Loan | None:
        start = self._gap(len(memory))
        if start is None:
            return None
        end = start + len(memory)
        self._memory[start:end] = np.frombuffer(memory, np.uint8)
        loan = _Loan(start, end, time.monotonic())
        self._loans.append(loan)
        self._loans.sort(key=lambda loan: loan.start)
        return loan

    def oldest_loan_s(self) -> float:
        since = min((loan.since for loan in self._loans), default=time.monotonic())
        return time.monotonic() - since

    def close(self) -> None:
        os.close(self._fd)

    def _gap(self, size: int) -> int | None:
        """Returns the first gap that fits, since the arena's first pages are already allocated."""
        start = HEADER_BYTES
        for loan in self._loans:
            if loan.start - start >= size:
                return start
            start = -(-loan.end // _ALIGNMENT) * _ALIGNMENT
        return start if ARENA_BYTES - start >= size else None


def flags_of(memory: np.ndarray) -> np.ndarray:
    """Returns an arena's flags: nonzero while a block is lent."""
    return memory[4096:HEADER_BYTES]


def can_share() -> bool:
    """Whether this system supports arenas."""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create")


_SHARED_MARK = b"\xc1m"  # no msgpack begins with c1, so no header does
_RECORD = struct.Struct(f"<II{TOKEN_BYTES}sIQQ")
_NOT_SHARED = bytes(_RECORD.size)
_LEAST_SHARED_BYTES = 1 << 16  # smaller frames are cheaper in the message
_MOST_MAPPED = 64  # over all peers
_SEALED = fcntl.F_SEAL_SHRINK


def share_frames(
    frames: Sequence[Frame], lender: Lender, *, sources: Sequence[np.ndarray] = ()
) -> Sequence[Frame]:
    """Moves large frames into shared memory; returns the frames to send instead.

    If the arrays are immutable and given as `sources`, several peers share one copy.
    """
    known: list[np.ndarray | None] = [None, *sources] if sources else [None] * len(frames)
    blocks = [
        lender.lend(memoryview(frame), source)
        if frame_bytes(frame) >= _LEAST_SHARED_BYTES
        else None
        for frame, source in zip(frames, known, strict=True)
    ]
    if not any(blocks):
        return frames
    first = _SHARED_MARK + b"".join(
        _NOT_SHARED if block is None else _packed(block) for block in blocks
    )
    return [first, *(b"" if block else frame for block, frame in zip(blocks, frames, strict=True))]


def is_shared(parts: Sequence[Frame]) -> bool:
    """Whether parts are the result of `share_frames`."""
    return bool(parts) and bytes(parts[0][:2]) == _SHARED_MARK


def _packed(block: Block) -> bytes:
    return _RECORD.pack(block.pid, block.fd, block.token, block.flag, block.start, block.size)


@dataclass(frozen=True)
class _Mapped:
    """A mapped arena, and the first peer that named it."""

    memory: np.ndarray
    peer: object


class Borrower:
    """Resolves frames in the memory of other processes of this machine.

    Per peer it maps as many arenas as a lender can have, all of the same fixed size; mapping a
    further one evicts the peer's oldest.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._mapped: dict[bytes, _Mapped] = {}  # by token

    @property
    def mapped_bytes(self) -> int:
        """Bytes of other processes' memory that are mapped."""
        return len(self._mapped) * ARENA_BYTES

    def find(self, parts: Sequence[Frame], peer: object = None) -> Sequence[Frame]:
        """Returns a message's frames; a block returns to its lender once it is unused."""
        records, frames = memoryview(parts[0])[len(_SHARED_MARK) :], parts[1:]
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
        # Every view keeps this array alive, and so the block.
        ended = weakref.finalize(lent, _give_back, flags_of(memory), block.flag, os.getpid())
        ended.atexit = False
        return lent.data.toreadonly()

    def _map(self, block: Block, peer: object) -> np.ndarray:
        try:
            memory = _mapped(f"/proc/{block.pid}/fd/{block.fd}")
        except (OSError, ValueError) as error:
            raise FrameError(f"memory of process {block.pid} cannot be shared: {error}") from error
        if memory[:TOKEN_BYTES].tobytes() != block.token:
            raise FrameError(f"memory of process {block.pid} does not match the message")
        of_peer = [token for token, one in self._mapped.items() if one.peer == peer]
        if len(of_peer) >= MOST_ARENAS:
            del self._mapped[of_peer[0]]
        elif len(self._mapped) >= _MOST_MAPPED:
            del self._mapped[next(iter(self._mapped))]
        self._mapped[block.token] = _Mapped(memory, peer)
        return memory


def _mapped(path: str) -> np.ndarray:
    """Maps an arena. Other files are not even opened: a sender may name any path."""
    if not str(Path(path).readlink()).startswith(f"/memfd:{NAME}"):
        raise ValueError("it is not memory that jaxfleet shares")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        sealed, found = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALED, os.fstat(fd)
        if not sealed or found.st_size != ARENA_BYTES:
            raise ValueError("it has another size, or may get one")
        if found.st_uid != os.geteuid():  # root may open another user's file
            raise ValueError("it is another user's")
        return np.frombuffer(mmap.mmap(fd, ARENA_BYTES), np.uint8)
    finally:
        os.close(fd)


def _give_back(flags: np.ndarray, flag: int, borrower: int) -> None:
    """Clears a flag, except in a forked child, which has borrowed nothing itself."""
    if os.getpid() == borrower:
        flags[flag] = 0
