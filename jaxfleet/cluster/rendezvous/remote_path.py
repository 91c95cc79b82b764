"""The subset of `Path` needed here, on a file system that is reached by commands."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from jaxfleet.cluster.filesystems import FS


@dataclass(frozen=True)
class FsPath:
    """A file or folder of a file system that has the methods of `FS`."""

    fs: FS
    path: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def __truediv__(self, name: str) -> "FsPath":
        return FsPath(self.fs, f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.path

    def with_name(self, name: str) -> "FsPath":
        return FsPath(self.fs, str(PurePosixPath(self.path).with_name(name)))

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        del parents, exist_ok
        self.fs.mkdirs(self.path)

    def iterdir(self) -> Iterator["FsPath"]:
        yield from (self / name for name in self.fs.ls_dir(self.path)[1])

    def glob(self, pattern: str) -> Iterator["FsPath"]:
        yield from (found for found in self.iterdir() if fnmatchcase(found.name, pattern))

    def read_bytes(self) -> bytes:
        if not self.fs.is_exist(self.path):
            raise FileNotFoundError(self.path)
        with tempfile.TemporaryDirectory() as here:
            copy = Path(here, "copy")
            self.fs.download(self.path, str(copy))
            return copy.read_bytes()

    def write_bytes(self, data: bytes) -> int:
        with tempfile.TemporaryDirectory() as here:
            copy = Path(here, self.name)
            copy.write_bytes(data)
            self.fs.delete(self.path)
            self.fs.upload(str(copy), self.path)
        return len(data)

    def replace(self, target: "FsPath") -> None:
        """Renames the file, replacing an existing target."""
        self.fs.delete(target.path)
        self.fs.mv(self.path, target.path)

    def unlink(self, *, missing_ok: bool = False) -> None:
        del missing_ok
        self.fs.delete(self.path)


Folder: TypeAlias = Path | FsPath
