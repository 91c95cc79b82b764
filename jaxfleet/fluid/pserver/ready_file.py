"""ReadyFile: `/tmp/paddle.<pid>.port`, by which scripts of fluid see that a server listens."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self


class ReadyFile:
    """Holds the port of this process's server while it serves.

    Args:
        folder: where it is; fluid's unless given.
    """

    def __init__(self, folder: Path = Path("/tmp")) -> None:  # noqa: S108  # fluid's
        self._path = folder / f"paddle.{os.getpid()}.port"
        self._is_written = False

    def announce(self, endpoint: str) -> None:
        """Writes the port of an endpoint.

        A file that another user has put there stays, and is not followed: the server serves
        without.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            self._path.unlink(missing_ok=True)  # of a process that had this number before
            descriptor = os.open(self._path, flags, 0o644)
        except OSError:
            return
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(endpoint.rpartition(":")[2])
        self._is_written = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_written:
            self._path.unlink(missing_ok=True)
