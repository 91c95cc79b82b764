"""Temporary folder of a launch, and the job's secret in it."""

import fcntl
import os
import secrets
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from jaxfleet.launch.job_spec import AnyJob


def temporary_folder(stack: ExitStack) -> Path:
    """Creates a folder, mode 0700, that is removed with the stack.

    It is locked meanwhile: systemd-tmpfiles, which removes files unused for days, skips locked
    folders, and a server that is restarted in the third week needs its secret.
    """
    made = tempfile.TemporaryDirectory(prefix="jaxfleet-", ignore_cleanup_errors=True)
    folder = Path(stack.enter_context(made))
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


SECRET_NAME = "secret"

AJob = TypeVar("AJob", bound=AnyJob)


def with_secret(job: AJob, stack: ExitStack) -> tuple[AJob, list[Path]]:
    """Returns the job with the file of its secret, and the folders that the launch removes.

    A job without a given secret gets a new one: 32 random bytes in a file that only its owner may
    read (0600), in a new folder that only its owner may enter (0700). Processes get the file's
    path, never the secret. With `insecure` there is none.
    """
    if job.secret_file is not None or job.insecure:
        return job, []
    folder = temporary_folder(stack)
    return replace(job, secret_file=write_secret(folder / SECRET_NAME)), [folder]


def write_secret(path: Path) -> Path:
    """Writes a new secret to a new file, and returns its path."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path
