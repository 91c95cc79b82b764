"""The secret of a job: the file that the user gave, or a new one that ends with the job."""

import os
import secrets
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from jaxfleet.launch.job import AnyJob
from jaxfleet.launch.temporary import temporary_folder

SECRET_NAME = "secret"

AJob = TypeVar("AJob", bound=AnyJob)


def with_secret(job: AJob, stack: ExitStack) -> tuple[AJob, list[Path]]:
    """Returns the job with the file of its secret, and the folders that the launch removes.

    A job whose user gave no secret gets one of its own: 32 random bytes in a file that its owner
    alone may read (0600), in a new folder that its owner alone may enter (0700). Processes are
    given the file's path, never the secret. With `insecure` there is none.

    Args:
        job: what is launched.
        stack: removes what was made when it is closed.
    """
    if job.secret_file is not None or job.insecure:
        return job, []
    folder = temporary_folder(stack)
    return replace(job, secret_file=write_secret(folder / SECRET_NAME)), [folder]


def write_secret(path: Path) -> Path:
    """Writes a new secret to a file that is not there yet, and returns its path."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path
