"""Ends the processes of a launch that was killed. A program that needs only Python.

It reads the launch's process groups from a pipe whose other end only the launching process holds:
however that process ends, the pipe closes, and the guard ends the remaining groups. It needs no
cooperation of the processes, reaches their descendants too, and is not their parent, so it works on
any POSIX system.

    python guard.py GRACE_S [FOLDER]

Each line is a group's number, with `+` when it begins and `-` when it is gone. The folder is
removed at the end.
"""

import os
import shutil
import signal
import sys
import time


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
    groups = {group for group in groups if _signal(group, signal.SIGTERM)}
    groups = {group for group in groups if _signal(group, signal.SIGCONT)}
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        groups = {group for group in groups if _signal(group, 0)}
    for group in groups:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (
        ProcessLookupError,
        PermissionError,
    ):  # macOS raises the second for a group that has ended
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
