"""Files of arrays by name: numpy's `.npz`, whose parts bear checksums, without pickles.

`numpy.load` reads them. A dtype that numpy does not know by itself, such as bfloat16, is kept as
its bits, and a table in the file says what they are.
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

from jaxfleet.checkpoint.files import sync
from jaxfleet.checkpoint.layout import TEMPORARY, unique
from jaxfleet.errors import SavedError
from jaxfleet.ops.jax_adapter import numpy_dtype

FORMAT, VERSION = "jaxfleet fluid variables", 1
_TABLE = "jaxfleet.json"
_ARRAY = ".npy"
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, TypeError)

Writer: TypeAlias = Callable[[Path], None]  # writes a new file


def file_of(folder: Path, name: str) -> Path:
    """Returns where a variable of its own file is: a name is never a path."""
    quoted = quote(name, safe="@+")
    return folder / (quoted if quoted.strip(".") else quoted.replace(".", "%2E"))


def write_files(writers: Iterable[tuple[Path, Writer]]) -> None:
    """Writes files, which take their names once all of them are on the disk.

    Raises:
        SavedError: one cannot be written; those that were there are as they were.
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
    """Returns what writes arrays by name into one file."""

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
    """Returns what writes a file of some bytes."""

    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Returns the arrays of a file.

    Args:
        path: where it is.
        names: which; all unless given. What the file has not is left out.

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
    """Returns what is in a file.

    Raises:
        SavedError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> SavedError:
    """Returns the error of a file that cannot be read."""
    return SavedError(f"cannot read {path}: {error.strerror or error}")


def _dtypes(archive: zipfile.ZipFile) -> Mapping[str, str]:
    table = json.loads(archive.read(_TABLE))
    if (table["format"], table["version"]) != (FORMAT, VERSION):
        raise ValueError(f"its format is {table['format']!r}, version {table['version']!r}")
    return {str(name): str(dtype) for name, dtype in table["dtypes"].items()}


def _array(archive: zipfile.ZipFile, name: str, dtype: str) -> np.ndarray:
    bits = io.BytesIO(archive.read(f"{name}{_ARRAY}"))  # the whole part, so that its sum is checked
    array: np.ndarray = np.lib.format.read_array(bits, allow_pickle=False)
    return array if array.dtype.name == dtype else array.view(numpy_dtype(dtype))


def _as_bits(array: np.ndarray) -> np.ndarray:
    """Returns an array of one of numpy's own dtypes, with the same bits."""
    return array if array.dtype.isbuiltin == 1 else array.view(np.dtype(f"u{array.itemsize}"))
