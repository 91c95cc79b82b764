"""Memory that a process of this machine lends to another, a block at a time.

An arena is a sealed memfd: it has no name in the file system, so nothing is left behind, and the
one who maps it need not fear that it shrinks. It begins with a token, which tells it from another
with the same number of process and file, and with a flag for each block. The lender sets a flag and
says where the block is; the borrower clears it once nothing uses the block any more. Neither waits
for the other: while no block is free, arrays travel in messages.
"""

import fcntl
import mmap
import os
import secrets
import sys
import time
from dataclasses import dataclass

import numpy as np

TOKEN_BYTES = 16
BLOCKS = 1024
HEADER_BYTES = 4096 + 4 * BLOCKS
ARENA_BYTES = 128 << 20  # its pages come as they are written to
NAME = "jaxfleet"

_ALIGNMENT = 4096
_LONGEST_LOAN_S = 30.0  # a borrower that has a block for longer may be gone
_MOST_ARENAS = 4


@dataclass(frozen=True)
class Block:
    """Where an array is.

    Attributes:
        pid: the lender's process.
        fd: the arena's file there.
        token: the arena's.
        flag: which flag is the block's.
        start: in bytes, from the arena's beginning.
        size: in bytes.
    """

    pid: int
    fd: int
    token: bytes
    flag: int
    start: int
    size: int


class Lender:
    """Lends memory to one borrower."""

    def __init__(self) -> None:
        self._arenas: list[_Arena] = []
        self.used_at = time.monotonic()

    def lend(self, memory: memoryview) -> Block | None:
        """Copies bytes to where the borrower sees them; returns None where there is no room.

        A borrower that was killed gives nothing back, so where a loan is very old there comes a new
        arena, a few times. The old ones stay, for what is under way.
        """
        self.used_at = time.monotonic()
        if len(memory) > ARENA_BYTES - HEADER_BYTES:
            return None
        found = self._arenas[-1].lend(memory) if self._arenas else None
        if found is None and self._may_grow():
            self._arenas.append(_Arena())
            found = self._arenas[-1].lend(memory)
        return found

    def close(self) -> None:
        """Gives the memory back; whoever has mapped it keeps it."""
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()

    def _may_grow(self) -> bool:
        if not self._arenas:
            return True
        stuck = self._arenas[-1].oldest_loan_s() > _LONGEST_LOAN_S
        return stuck and len(self._arenas) < _MOST_ARENAS


@dataclass(frozen=True)
class _Loan:
    flag: int
    start: int
    end: int
    since: float


class _Arena:
    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, ARENA_BYTES)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = np.frombuffer(mmap.mmap(self._fd, ARENA_BYTES), np.uint8)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._memory[:TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)
        self._flags = flags_of(self._memory)
        self._loans: list[_Loan] = []  # by where they begin

    def lend(self, memory: memoryview) -> Block | None:
        self._loans = [loan for loan in self._loans if self._flags[loan.flag]]
        taken = {loan.flag for loan in self._loans}
        flag = next((flag for flag in range(BLOCKS) if flag not in taken), None)
        start = self._gap(len(memory))
        if flag is None or start is None:
            return None
        end = start + len(memory)
        self._memory[start:end] = np.frombuffer(memory, np.uint8)
        self._flags[flag] = 1
        self._loans.append(_Loan(flag, start, end, time.monotonic()))
        self._loans.sort(key=lambda loan: loan.start)
        return Block(os.getpid(), self._fd, self._token, flag, start, len(memory))

    def oldest_loan_s(self) -> float:
        since = min((loan.since for loan in self._loans), default=time.monotonic())
        return time.monotonic() - since

    def close(self) -> None:
        os.close(self._fd)

    def _gap(self, size: int) -> int | None:
        """Returns where there is room, near the beginning: those pages are there already."""
        start = HEADER_BYTES
        for loan in self._loans:
            if loan.start - start >= size:
                return start
            start = -(-loan.end // _ALIGNMENT) * _ALIGNMENT
        return start if ARENA_BYTES - start >= size else None


def flags_of(memory: np.ndarray) -> np.ndarray:
    """Returns an arena's flags: not zero while a block is lent."""
    return memory[4096:HEADER_BYTES].view(np.uint32)


def can_share() -> bool:
    """Tells whether this system has what an arena needs."""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create")
