"""A disk that loses what was not synced, fills up, and stops a process between two operations.

Files are real, in a folder in memory; what is simulated is their durability. Each `fsync` records
the content of its file or the names of its folder. When the machine loses its power, each file and
folder has what was synced, or the newer content, or of a file's newer content a beginning only, as
drawn. A process that is killed alone loses nothing: the kernel has its data.
"""

import errno
import os
import random
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Tree: TypeAlias = "dict[str, bytes | Tree]"

_LOST = 0.5  # how often names that were not synced are lost


@dataclass
class Disk:
    """The disk of one machine.

    Attributes:
        process: the name of the process that uses it.
        root: the folder that is simulated.
        shared: a folder of another machine, which keeps all that this one writes there.
        moving: the folder through which the state goes to other servers. It is full when this disk
            is, and loses nothing.
        crash: called for `crash_at`.
        is_full: every operation that needs space fails.
        crash_at: number of the operation during which `crash` is called; None for none.
        operations: number of operations so far.
    """

    process: str
    root: Path
    shared: Path
    moving: Path
    draw: random.Random
    crash: Callable[[], None]
    is_full: bool = False
    crash_at: int | None = None
    operations: int = 0
    _contents: dict[int, bytes] = field(default_factory=dict)  # synced, by inode
    _names: dict[int, dict[str, int]] = field(default_factory=dict)  # synced, by folder's inode

    def has(self, path: str) -> bool:
        return any(_is_below(path, each) for each in (self.root, self.shared, self.moving))

    def before(self, path: str, *, needs_space: bool) -> None:
        """Called before an operation: the process may be killed, or the disk be full."""
        self.operations += 1
        if self.crash_at is not None and self.operations >= self.crash_at:
            self.crash_at = None
            self.crash()
        is_here = _is_below(path, self.root) or _is_below(path, self.moving)
        if self.is_full and needs_space and is_here:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def synced(self, path: str) -> None:
        """Records that a file's content, or a folder's names, are on disk."""
        if not _is_below(path, self.root):
            return
        found = os.stat(path)  # noqa: PTH116
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(path) as entries:
                self._names[found.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._contents[found.st_ino] = Path(path).read_bytes()

    def tree(self, *, loses_power: bool) -> Tree:
        """Returns what a restarted process finds."""
        if not self.root.exists():
            return {}
        where = {path.stat().st_ino: path for path in self.root.rglob("*")}
        inode = self.root.stat().st_ino
        return self._folder(where | {inode: self.root}, inode, loses_power=loses_power)

    def put_back(self, tree: Tree) -> None:
        """Replaces all files: after the killed process has run its handlers, or for another one."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._contents.clear()
        self._names.clear()
        self._make(self.root, tree)

    def _folder(self, where: Mapping[int, Path], inode: int, *, loses_power: bool) -> Tree:
        names, synced = {}, self._names.get(inode, {})
        if (path := where.get(inode)) is not None:
            with os.scandir(path) as entries:
                names = {entry.name: entry.inode() for entry in entries}
        if loses_power and synced != names and (path is None or self.draw.random() < _LOST):
            names = synced  # the journal of its newer names was lost
        found: Tree = {}
        for name, child in sorted(names.items()):
            at = where.get(child)
            if child in self._names or (at is not None and at.is_dir()):
                found[name] = self._folder(where, child, loses_power=loses_power)
            elif (content := self._file(at, child, loses_power=loses_power)) is not None:
                found[name] = content
        return found

    def _file(self, path: Path | None, inode: int, *, loses_power: bool) -> bytes | None:
        synced = self._contents.get(inode)
        newest = path.read_bytes() if path is not None else synced
        if not loses_power or newest is None or synced == newest:
            return newest
        fate = self.draw.randrange(3)
        if fate == 0:
            return newest
        if fate == 1:
            return newest[: self.draw.randrange(len(newest) + 1)]
        return synced if synced is not None else b""

    def _make(self, path: Path, tree: Tree) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in tree.items():
            if isinstance(content, bytes):
                (path / name).write_bytes(content)
                self._contents[(path / name).stat().st_ino] = content
            else:
                self._make(path / name, content)
        self.synced(str(path))


def _is_below(path: str, folder: Path) -> bool:
    root = str(folder)
    return path == root or path.startswith(f"{root}/")


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


def patches(find: Callable[[str], Disk | None]) -> dict[str, Callable[..., Any]]:
    """Returns functions for `os` that use the disk that `find` returns for a path."""
    fsync, mkdir, rename, replace = os.fsync, os.mkdir, os.rename, os.replace

    def synced(descriptor: int) -> None:
        path = _path_of(descriptor)
        if (disk := find(path)) is None:
            fsync(descriptor)
            return
        disk.before(path, needs_space=True)
        disk.synced(path)

    def made(path: Any, *args: Any, **more: Any) -> None:
        if (disk := find(os.fspath(path))) is not None:
            disk.before(os.fspath(path), needs_space=True)
        mkdir(path, *args, **more)

    def renamed(old: Any, new: Any, **more: Any) -> None:
        if (disk := find(os.fspath(old))) is not None:
            disk.before(os.fspath(old), needs_space=False)
        rename(old, new, **more)

    def replaced(old: Any, new: Any, **more: Any) -> None:
        if (disk := find(os.fspath(old))) is not None:
            disk.before(os.fspath(old), needs_space=False)
        replace(old, new, **more)

    return {"fsync": synced, "mkdir": made, "rename": renamed, "replace": replaced}
