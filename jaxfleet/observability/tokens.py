"""Token files, with which the same user's `jaxfleet top` reads a server's metrics."""

import os
from contextlib import suppress
from pathlib import Path

from jaxfleet.env import runtime_dir


def write_token(port: int, token: str) -> Path | None:
    """Writes a token to a file that only this user may read; None if there is no private folder."""
    folder = runtime_dir()
    if folder is None:
        return None
    path = folder / f"metrics-{port}"
    with suppress(OSError):
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(token)
        return path
    return None


def read_token(port: int) -> str | None:
    """Returns the token of the metrics at a port of this machine, None if unknown."""
    folder = runtime_dir()
    with suppress(OSError, UnicodeDecodeError):
        return (folder / f"metrics-{port}").read_text().strip() if folder is not None else None
    return None
