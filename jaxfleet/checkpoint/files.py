"""Files and folders that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxfleet.checkpoint.layout import TEMPORARY, unique


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Gives a new folder beside `final`, which takes that name when the block ends well.

    All that is in it is on the disk before it takes the name. If the block fails it is removed.
    """
    stage = final.parent / f"{TEMPORARY}{final.name}"
    stage.mkdir()
    try:
        yield stage
        sync_tree(stage)
        stage.rename(final)
        sync(final.parent)
    except BaseException:  # Ctrl-C too must leave nothing
        remove(stage)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file, which has the old content or the new one at any moment.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    stage = path.parent / unique(f"{TEMPORARY}{path.name}")
    try:
        with stage.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        stage.replace(path)
        sync(path.parent)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Removes a file or a folder, as far as that can be done.

    What cannot be removed does no harm, and is tried again at the next save.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_empty(folder: Path) -> None:
    """Removes a folder with nothing in it, and leaves any other."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def entries(folder: Path) -> tuple[str, ...]:
    """Returns the names in a folder; none where there is no folder.

    Raises:
        OSError: it is no folder, or may not be read.
    """
    try:
        return tuple(sorted(os.listdir(folder)))  # noqa: PTH208  # names, not paths
    except FileNotFoundError:
        return ()


def measure(folder: Path) -> tuple[int, int]:
    """Returns how many files are under a folder, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def sync_tree(folder: Path) -> None:
    """Waits until a folder and all under it are on the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
