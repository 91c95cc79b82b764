"""The launcher's connection to the guard, which outlives it."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxfleet.launch import guard

_END_S = 10.0


class GuardClient:
    """Starts the guard, and reports process groups to it."""

    def __init__(self, grace_s: float, folders: Sequence[Path] = ()) -> None:
        self._grace_s = grace_s
        words = [sys.executable, "-I", "-S", guard.__file__, str(grace_s)]
        self._guard = subprocess.Popen(  # noqa: S603  # this package's own program
            [*words, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # must survive a Ctrl-C
            bufsize=0,
        )

    def watch(self, group: int) -> None:
        """Registers a group to end when this process does."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Removes a group that is gone: its number may be reused."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        # The guard was killed, or has ended with this launch while a process still ends.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._guard.stdin.write(line.encode())  # short enough for an atomic write

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(self._grace_s + _END_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
