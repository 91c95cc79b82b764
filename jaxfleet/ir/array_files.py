"""Files of named arrays: numpy's `.npz` without pickles, with a checksum for each array.

`numpy.load` reads them. A dtype that numpy lacks, such as bfloat16, is stored as its bits, and a
table in the file records the dtype.
"""

import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir.value_parser import parse_type
from jaxfleet.ir.variable import numpy_dtype

FORMAT, VERSION = "jaxfleet fluid variables", 1
_TABLE = "jaxfleet.json"
_ARRAY = ".npy"
_TYPE = ".type"  # suffix of a name for the entry with its type, in files of constants before 0.2
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, TypeError),
    *(AttributeError, ProgramError),  # a table or a type with other content
)


class ArrayFileError(ValueError):
    """A file is damaged, or was not written by `write_arrays`."""


def write_arrays(path: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes named arrays into a new file."""
    dtypes = {}
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, array in arrays:
            kept = _as_bits(array)
            dtypes[name] = array.dtype.name if array.itemsize else "float0"
            with archive.open(f"{name}{_ARRAY}", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, kept, allow_pickle=False)
        table = {"format": FORMAT, "version": VERSION, "dtypes": dtypes}
        archive.writestr(_TABLE, json.dumps(table, indent=1))


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, all or those in `names` that exist.

    Raises:
        OSError: the file cannot be read.
        ArrayFileError: it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            dtypes = _dtypes(archive)
            wanted = dtypes if names is None else [name for name in names if name in dtypes]
            return {name: _restored(_entry(archive, name), dtypes[name]) for name in wanted}
    except _DAMAGE as error:
        raise ArrayFileError(str(error)) from error


def _dtypes(archive: zipfile.ZipFile) -> Mapping[str, str]:
    listed = {name.removesuffix(_ARRAY) for name in archive.namelist()}
    if _TABLE not in listed and (typed := [name for name in listed if name + _TYPE in listed]):
        return {name: str(_entry(archive, name + _TYPE)) for name in typed}
    table = json.loads(archive.read(_TABLE))
    if (table["format"], table["version"]) != (FORMAT, VERSION):
        raise ValueError(f"its format is {table['format']!r}, version {table['version']!r}")
    return {str(name): str(dtype) for name, dtype in table["dtypes"].items()}


def _entry(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    bits = io.BytesIO(archive.read(f"{name}{_ARRAY}"))  # whole, so that its checksum is verified
    array: np.ndarray = np.lib.format.read_array(bits, allow_pickle=False)
    return array


def _restored(array: np.ndarray, dtype: str) -> np.ndarray:
    shape: tuple[object, ...] = array.shape
    if "[" in dtype:  # a type, whose bytes the array contains
        dtype, shape = parse_type(dtype)
    elif array.dtype.name == dtype:
        return array
    found = numpy_dtype(dtype)
    sizes = tuple(size for size in shape if isinstance(size, int))
    if array.size and found.itemsize:
        return array.view(found).reshape(sizes)
    if math.prod(sizes) * found.itemsize:  # checked before memory is taken
        raise ValueError(f"an array of shape {list(sizes)} has no bytes")
    return np.zeros(sizes, found)


def _as_bits(array: np.ndarray) -> np.ndarray:
    """Returns an array of one of numpy's own dtypes, in native byte order, with the same bits."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.isbuiltin == 1:
        return array
    if not array.itemsize:
        return np.zeros(array.shape, bool)
    return array.view(np.dtype(f"u{array.itemsize}"))
