"""A folder of a file system that is reached by commands, as far as a meeting needs a `Path`."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from jaxfleet.fleet.files import FS


@dataclass(frozen=True)
class FsPath:
    """A file or folder of a file system that has the methods of `FS`.

    Attributes:
        fs: the file system.
        path: in its own spelling, with slashes.
    """

    fs: FS
    path: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    def __truediv__(self, name: str) -> "FsPath":
        return FsPath(self.fs, f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.path

    def with_name(self, name: str) -> "FsPath":
        """Returns a file of another name in the same folder."""
        return FsPath(self.fs, str(PurePosixPath(self.path).with_name(name)))

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Makes the folder."""
        del parents, exist_ok
        self.fs.mkdirs(self.path)

    def iterdir(self) -> Iterator["FsPath"]:
        """Yields the files in the folder."""
        yield from (self / name for name in self.fs.ls_dir(self.path)[1])

    def glob(self, pattern: str) -> Iterator["FsPath"]:
        """Yields the files in the folder whose names fit."""
        yield from (found for found in self.iterdir() if fnmatchcase(found.name, pattern))

    def read_bytes(self) -> bytes:
        """Returns what the file holds.

        Raises:
            FileNotFoundError: there is none.
        """
        if not self.fs.is_exist(self.path):
            raise FileNotFoundError(self.path)
        with tempfile.TemporaryDirectory() as here:
            copy = Path(here, "copy")
            self.fs.download(self.path, str(copy))
            return copy.read_bytes()

    def write_bytes(self, data: bytes) -> int:
        """Writes the file."""
        with tempfile.TemporaryDirectory() as here:
            copy = Path(here, self.name)
            copy.write_bytes(data)
            self.fs.delete(self.path)
            self.fs.upload(str(copy), self.path)
        return len(data)

    def replace(self, target: "FsPath") -> None:
        """Gives the file another name, in place of a file of that name."""
        self.fs.delete(target.path)
        self.fs.mv(self.path, target.path)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Deletes the file; one that is not there is as good as deleted."""
        del missing_ok
        self.fs.delete(self.path)


Folder: TypeAlias = Path | FsPath
