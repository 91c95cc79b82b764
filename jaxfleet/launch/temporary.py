"""Folders that are there for as long as a launch."""

import tempfile
from contextlib import ExitStack
from pathlib import Path


def temporary_folder(stack: ExitStack) -> Path:
    """Returns a new folder, mode 0700, that is there for as long as the stack."""
    folder = tempfile.TemporaryDirectory(prefix="jaxfleet-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(folder))
