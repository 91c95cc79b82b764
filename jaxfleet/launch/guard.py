"""Ends the processes of a launch that was killed. A program that needs only Python.

It reads the launch's process groups from a pipe whose other end only the launching process holds:
however that process ends, the pipe closes, and the guard ends the remaining groups. It needs no
cooperation of the processes, reaches their descendants too, and is not their parent, so it works on
any POSIX system.

    python guard.py GRACE_S [FOLDER...]

Each line is a group's number, with `+` when it begins and `-` when it is gone. The folders are
removed at the end. `GuardClient` starts it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_END_S = 10.0


class GuardClient:
    """Starts the guard, and reports process groups to it."""

    def __init__(self, grace_s: float, folders: Sequence[Path] = ()) -> None:
        self._grace_s = grace_s
        words = [sys.executable, "-I", "-S", __file__, str(grace_s)]
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

    def close(self) -> None:
        """Lets the guard end what remains, and waits for its end."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(self._grace_s + _END_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


def main(grace_s: float, *folders: str) -> None:
    """Waits for the pipe to close, then ends the remaining groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launching process handles these
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    _end(groups, grace_s)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(groups: set[int], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    groups = {group for group in groups if signal_group(group, signal.SIGTERM)}
    groups = {group for group in groups if signal_group(group, signal.SIGCONT)}
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        groups = {group for group in groups if signal_group(group, 0)}
    for group in groups:
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether the group exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: the second, for a group that has ended
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
