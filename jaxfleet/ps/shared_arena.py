"""Memory that a process of this machine lends to another, a block at a time.

An arena is a sealed memfd: it has no name in the file system, so nothing is left behind, and the
one who maps it need not fear that it shrinks. It begins with a token, which tells it from another
with the same number of process and file, and with a flag for each borrower of a block. The lender
sets a flag and says where the block is; the borrower clears it once nothing uses the block any
more. Neither waits for the other: while no block is free, arrays travel in messages.
"""

import fcntl
import mmap
import os
import secrets
import sys
import time
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np

TOKEN_BYTES = 16
FLAGS = 4096
HEADER_BYTES = 4096 + FLAGS
ARENA_BYTES = 512 << 20  # its pages come as they are written to
NAME = "jaxfleet"

_ALIGNMENT = 4096
_LONGEST_LOAN_S = 30.0  # a borrower that has a block for longer may be gone
MOST_ARENAS = 4  # of one lender
_LONGEST_READ_S = 600.0  # then what was sent was read long ago, or never will be


@dataclass(frozen=True)
class Block:
    """Where an array is, for one borrower.

    Attributes:
        pid: the lender's process.
        fd: the arena's file there.
        token: the arena's.
        flag: which flag is the borrower's.
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
    """Lends memory to processes of this machine."""

    def __init__(self) -> None:
        self._arenas: list[_Arena] = []

    def lend(self, memory: memoryview, source: np.ndarray | None = None) -> Block | None:
        """Copies bytes to where the borrower sees them; returns None where there is no room.

        A borrower that was killed gives nothing back, so where a loan is very old there comes a new
        arena, a few times. The old ones stay for what is under way.

        Args:
            memory: the bytes.
            source: whose bytes they are, where it never changes: what is lent to one already is
                lent to the next without another copy.
        """
        if len(memory) > ARENA_BYTES - HEADER_BYTES:
            return None
        found = self._arenas[-1].lend(memory, source) if self._arenas else None
        if found is None and self._may_grow():
            self._arenas.append(_Arena())
            found = self._arenas[-1].lend(memory, source)
        return found

    def close(self) -> None:
        """Gives the memory back; whoever has mapped it keeps it."""
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
    """A block, and the flags of those who have it."""

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
        self._loans: list[_Loan] = []  # by where they begin
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
        """Notes what borrowers have given back."""
        for loan in self._loans:
            self._free.extend(flag for flag in loan.flags if not self._flags[flag])
            loan.flags = [flag for flag in loan.flags if self._flags[flag]]
        self._loans = [loan for loan in self._loans if loan.flags]
        self._by_source = {at: it for at, it in self._by_source.items() if it[1].flags}

    def _lent_already(self, source: np.ndarray | None) -> _Loan | None:
        """Returns the loan of these very bytes, if it was not taken back."""
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
        """Returns where there is room, near the beginning: those pages are there already."""
        start = HEADER_BYTES
        for loan in self._loans:
            if loan.start - start >= size:
                return start
            start = -(-loan.end // _ALIGNMENT) * _ALIGNMENT
        return start if ARENA_BYTES - start >= size else None


def flags_of(memory: np.ndarray) -> np.ndarray:
    """Returns an arena's flags: not zero while a block is lent."""
    return memory[4096:HEADER_BYTES]


def can_share() -> bool:
    """Tells whether this system has what an arena needs."""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create")
