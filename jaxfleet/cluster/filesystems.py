"""File systems for checkpoints and rendezvous: local, or reached by commands.

Any class with the methods of `FS` works; `need_upload_download` is True if files are first written
locally and then uploaded whole.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, Protocol, TypeAlias

from jaxfleet.errors import CheckpointError, UnsupportedError
from jaxfleet.ops.user_frames import line_of_caller


class FS(Protocol):
    """Interface of a file system, with paths in its own spelling."""

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        """Returns the names of folders and of files in a folder; none if it does not exist."""

    def list_dirs(self, fs_path: str) -> list[str]:
        """Returns the names of folders in a folder."""

    def is_exist(self, fs_path: str) -> bool:
        """Whether the file or folder exists."""

    def mkdirs(self, fs_path: str) -> None:
        """Creates a folder and its parents."""

    def delete(self, fs_path: str) -> None:
        """Deletes a file, or a folder with its contents; does nothing if it does not exist."""

    def mv(self, fs_src_path: str, fs_dst_path: str) -> None:
        """Renames a file or a folder, atomically."""

    def need_upload_download(self) -> bool:
        """Whether files are downloaded before they are read, and uploaded once written."""

    def upload(self, local_path: str, fs_path: str) -> None:
        """Copies a file or a folder from this machine."""

    def download(self, fs_path: str, local_path: str) -> None:
        """Copies a file or a folder to this machine."""


class LocalFS:
    """The files of this machine, including shared mounts."""

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        if not Path(fs_path).is_dir():
            return [], []
        found = sorted(Path(fs_path).iterdir())
        return [p.name for p in found if p.is_dir()], [p.name for p in found if not p.is_dir()]

    def list_dirs(self, fs_path: str) -> list[str]:
        return self.ls_dir(fs_path)[0]

    def is_exist(self, fs_path: str) -> bool:
        return Path(fs_path).exists()

    stat = is_exist

    def is_file(self, fs_path: str) -> bool:
        return Path(fs_path).is_file()

    def is_dir(self, fs_path: str) -> bool:
        return Path(fs_path).is_dir()

    def mkdirs(self, fs_path: str) -> None:
        """Creates a folder and its parents.

        Raises:
            CheckpointError: a file has that name.
        """
        if self.is_file(fs_path):
            _refuse(f"{fs_path} is a file, and is to be a folder")
        Path(fs_path).mkdir(parents=True, exist_ok=True)

    def touch(self, fs_path: str, exist_ok: bool = True) -> None:
        """Creates an empty file.

        Raises:
            CheckpointError: the file exists, and `exist_ok` is False.
        """
        if self.is_exist(fs_path) and not exist_ok:
            _refuse(f"{fs_path} is there already")
        Path(fs_path).touch()

    def delete(self, fs_path: str) -> None:
        if self.is_dir(fs_path):
            shutil.rmtree(fs_path)
        else:
            Path(fs_path).unlink(missing_ok=True)

    def mv(self, fs_src_path: str, fs_dst_path: str, overwrite: bool = False) -> None:
        """Renames a file or a folder, atomically.

        Raises:
            CheckpointError: the source does not exist, or the target does.
        """
        if not self.is_exist(fs_src_path):
            _refuse(f"there is no {fs_src_path}")
        if overwrite:
            self.delete(fs_dst_path)
        elif self.is_exist(fs_dst_path):
            _refuse(f"{fs_dst_path} is there already")
        Path(fs_src_path).replace(fs_dst_path)

    rename = mv

    def need_upload_download(self) -> bool:
        return False

    def upload(self, local_path: str, fs_path: str) -> None:
        _copy(local_path, fs_path)

    def download(self, fs_path: str, local_path: str) -> None:
        _copy(fs_path, local_path)


class BDFS:
    """Baidu's internal file system, not available here.

    Raises:
        UnsupportedError: always.
    """

    def __init__(
        self, hdfs_name: str, hdfs_ugi: Any, time_out: int = 1200000, sleep_inter: int = 1000
    ) -> None:
        del hdfs_ugi, time_out, sleep_inter
        hint = "a shared folder and LocalFS, or a class of your own with the methods of FS"
        raise UnsupportedError(f"{hdfs_name}: there is no client of this file system", hint=hint)


def own_folder(name: str) -> Path:
    """Returns a folder of this user in the machine's temporary folder."""
    folder = Path(tempfile.gettempdir(), f"jaxfleet-{name}-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        _refuse(f"{folder} is not a folder that only this user may write to")
    return folder


def _copy(source: str, target: str) -> None:
    if not Path(source).exists():
        _refuse(f"there is no {source}")
    if Path(source).is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(what, source=line_of_caller())


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
