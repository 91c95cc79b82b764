"""Prepares a process of a job, and executes its command. A program that needs only Python.

On Linux it asks the kernel for a SIGTERM when the launching process dies. (The guard ends the whole
process group in that case, but may have been killed as well.) Then it waits until the guard tracks
the process group, and executes the command.

    python gate.py LAUNCHER COMMAND [ARGS...]

If the launching process dies first, the pipe on stdin is closed and the gate exits.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN, _NOT_FOUND = 126, 127  # as in shells


def main(launcher: int, command: Sequence[str]) -> int:
    """Replaces itself by the command; returns an exit status on failure."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher or not os.read(0, 1):
        return 1  # the launch has already ended
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for ignored in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores these, and the command would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))  # noqa: S606  # the user's own command
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
