"""File descriptors of a server: its limit, and a reserve for checkpoints."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 1 << 16
_KEPT = 64  # a checkpoint writes several files at once, each through a folder


def raise_limit() -> None:
    """Raises the soft limit of file descriptors to the hard limit, at most to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the system has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Reserve:
    """File descriptors that are available only while a checkpoint is written or read.

    Connections could otherwise take all of them between two checkpoints. Any thread may use it.

    Args:
        count: how many.
    """

    def __init__(self, count: int = _KEPT) -> None:
        self._count = count
        self._users = 0
        self._lock = threading.Lock()
        self._kept: list[int] = []
        self._take()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Frees the descriptors while the block runs."""
        with self._lock:
            self._users += 1
            self._give()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._take()

    def close(self) -> None:
        """Frees the descriptors permanently."""
        with self._lock:
            self._count = 0
            self._give()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # fewer are left; the next time there may be more
            while len(self._kept) < self._count:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _give(self) -> None:
        while self._kept:
            os.close(self._kept.pop())
