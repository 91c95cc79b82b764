"""This process's end of the guard, which outlives it."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxfleet.launch import guard

_END_S = 10.0


class Keeper:
    """Starts the guard, and tells it of process groups.

    Args:
        grace_s: how long processes may take to end once they were told to.
        folders: what the guard removes when it ends.
    """

    def __init__(self, grace_s: float, folders: Sequence[Path] = ()) -> None:
        self._grace_s = grace_s
        words = [sys.executable, "-I", "-S", guard.__file__, str(grace_s)]
        self._guard = subprocess.Popen(  # noqa: S603  # this package's own program
            [*words, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C must not end it first
            bufsize=0,
        )

    def watch(self, group: int) -> None:
        """Has the group ended when this process ends."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Says that the group is gone, and that its number may soon be another's."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        # Somebody ended it, or this launch ends while a process still does: there is no guard then.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._guard.stdin.write(line.encode())  # short enough to be written at once

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
