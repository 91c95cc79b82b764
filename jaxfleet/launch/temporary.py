"""Folders that are there for as long as a launch."""

import fcntl
import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path


def temporary_folder(stack: ExitStack) -> Path:
    """Returns a new folder, mode 0700, that is there for as long as the stack.

    It is locked meanwhile: systemd-tmpfiles, which removes what was not used for days, leaves
    locked folders alone, and a server that is started again in the third week needs its secret.
    """
    made = tempfile.TemporaryDirectory(prefix="jaxfleet-", ignore_cleanup_errors=True)
    folder = Path(stack.enter_context(made))
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder
