"""Files of fluid's variables: arrays by name, written atomically."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import numpy as np

from jaxfleet.checkpoint.files import TEMPORARY, make_folder, sync, unique
from jaxfleet.errors import SavedError
from jaxfleet.ir import array_files

Writer: TypeAlias = Callable[[Path], None]  # writes a new file


def file_of(folder: Path, name: str) -> Path:
    """Returns the path of a variable's own file; a variable name is never used as a path."""
    quoted = quote(name, safe="@+")
    return folder / (quoted if quoted.strip(".") else quoted.replace(".", "%2E"))


def write_files(writers: Iterable[tuple[Path, Writer]]) -> None:
    """Writes files, and renames them into place once all are on the disk.

    Raises:
        SavedError: one cannot be written; the existing files are unchanged.
    """
    stages: list[tuple[Path, Path]] = []
    path = Path()
    try:
        for path, write in writers:
            make_folder(path.parent)
            stages.append((path.parent / unique(f"{TEMPORARY}{path.name[:100]}"), path))
            write(stages[-1][0])
            sync(stages[-1][0])
        for stage, path in stages:
            stage.replace(path)
        for folder in {path.parent for _, path in stages}:
            sync(folder)
    except OSError as error:
        if isinstance(error, SavedError):
            raise
        raise SavedError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        for stage, _ in stages:
            stage.unlink(missing_ok=True)


def arrays_writer(arrays: Iterable[tuple[str, np.ndarray]]) -> Writer:
    """Returns a writer of named arrays into one file."""
    return partial(array_files.write_arrays, arrays=arrays)


def bytes_writer(data: bytes) -> Writer:
    """Returns a writer of bytes."""

    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, all or those in `names` that exist.

    Raises SavedError if there is no such file, or it is damaged.
    """
    try:
        return array_files.read_arrays(path, names)
    except array_files.ArrayFileError as error:
        hint = "save it again; files of the original fluid are not read"
        raise SavedError(f"{path} is damaged, or none of ours: {error}", hint=hint) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def read_bytes(path: Path) -> bytes:
    """Reads a file; SavedError if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> SavedError:
    """Returns the error for a file that cannot be read."""
    return SavedError(f"cannot read {path}: {error.strerror or error}")
