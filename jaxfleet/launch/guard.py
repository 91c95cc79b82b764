"""Ends the processes of a launch that was killed. Runs as a program, and needs Python alone.

It reads which process groups there are from a pipe whose other end only the launching process
holds: however that one ends, the pipe ends too, and what it then left running is ended here. It
asks nothing of the processes themselves, reaches what they have started in turn, and is no
parent of theirs, so that it works on any POSIX system.

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
    """Waits for the pipe to end, then ends what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these are the launching process's to act on
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
    """Returns whether there was such a group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says the second of one that has ended
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
