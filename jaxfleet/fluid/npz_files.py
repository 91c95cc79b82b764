"""Files of named arrays: numpy's `.npz` without pickles, with a checksum for each array.

`numpy.load` reads them. A dtype that numpy lacks, such as bfloat16, is stored as its bits, and a
table in the file records the dtype.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import numpy as np

from jaxfleet.checkpoint.files import TEMPORARY, sync, unique
from jaxfleet.errors import SavedError
from jaxfleet.ops.jax_adapter import numpy_dtype

FORMAT, VERSION = "jaxfleet fluid variables", 1
_TABLE = "jaxfleet.json"
_ARRAY = ".npy"
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, TypeError)

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
            path.parent.mkdir(parents=True, exist_ok=True)
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

    def write(path: Path) -> None:
        dtypes = {}
        with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
            for name, array in arrays:
                kept, dtypes[name] = _as_bits(array), array.dtype.name
                with archive.open(f"{name}{_ARRAY}", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, kept, allow_pickle=False)
            table = {"format": FORMAT, "version": VERSION, "dtypes": dtypes}
            archive.writestr(_TABLE, json.dumps(table, indent=1))

    return write


def bytes_writer(data: bytes) -> Writer:
    """Returns a writer of bytes."""

    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, all or those in `names` that exist.

    Raises:
        SavedError: there is no such file, or it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            dtypes = _dtypes(archive)
            wanted = dtypes if names is None else [name for name in names if name in dtypes]
            return {name: _array(archive, name, dtypes[name]) for name in wanted}
    except _DAMAGE as error:
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


def _dtypes(archive: zipfile.ZipFile) -> Mapping[str, str]:
    table = json.loads(archive.read(_TABLE))
    if (table["format"], table["version"]) != (FORMAT, VERSION):
        raise ValueError(f"its format is {table['format']!r}, version {table['version']!r}")
    return {str(name): str(dtype) for name, dtype in table["dtypes"].items()}


def _array(archive: zipfile.ZipFile, name: str, dtype: str) -> np.ndarray:
    bits = io.BytesIO(archive.read(f"{name}{_ARRAY}"))  # whole, so that its checksum is verified
    array: np.ndarray = np.lib.format.read_array(bits, allow_pickle=False)
    return array if array.dtype.name == dtype else array.view(numpy_dtype(dtype))


def _as_bits(array: np.ndarray) -> np.ndarray:
    """Views an array as one of numpy's own dtypes, with the same bits."""
    return array if array.dtype.isbuiltin == 1 else array.view(np.dtype(f"u{array.itemsize}"))
