"""Writes a report to a file: all of it, or nothing."""

import os
import tempfile
from pathlib import Path

from jaxfleet.report.model import Report
from jaxfleet.report.render import render


def write_report(report: Report, path: str | Path) -> int:
    """Writes the page of a report and returns its bytes.

    A file is replaced once the new one is complete: a reader, or a browser that reloads, sees the
    old report or the new one. What is no file, such as `/dev/stdout` or a pipe, is written to.
    """
    data = render(report).encode()
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return len(data)
    target = target.resolve()  # what a link leads to is replaced, and not the link
    _replace(target, data)
    return len(data)


def _replace(target: Path, data: bytes) -> None:
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:60]}.")
    except OSError as error:  # which names the file beside, and not the report
        what = f"the report cannot be written: {error.strerror}"
        raise OSError(error.errno, what, str(target)) from error
    beside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        beside.chmod(_mode_of(target))
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _mode_of(target: Path) -> int:
    """Returns the permissions of a file that exists, or those that a new one would have."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
