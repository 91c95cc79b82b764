"""Numbered checkpoints of the collective fleet: written aside, and there at once.

::

    <path>/__paddle_fleet_checkpoint__.7/_paddle_fleet_param__    all that outlives a run
                                         fleet_train_status       {"epoch_no": 3}

A folder is written as `<name>.tmp`, and gets its name when all is in it; names with another dot
are none of a checkpoint, so what a killed process has left is not seen.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxfleet.errors import SavedError
from jaxfleet.fleet.files import FS
from jaxfleet.fluid.incubate.fleet.collective.train_status import TrainStatus

PARAMS = "_paddle_fleet_param__"
STATUS = "fleet_train_status"
_PREFIX = "__paddle_fleet_checkpoint__"
_NAME = re.compile(rf"{_PREFIX}\.(\d+)")


def numbers(root: str, fs: FS) -> list[int]:
    """Returns the numbers of the checkpoints in a folder, in order."""
    found = [_NAME.fullmatch(name) for name in fs.list_dirs(root)]
    return sorted(int(match[1]) for match in found if match)


def write(root: str, fs: FS, cache: str, status: TrainStatus, save: Callable[[Path], None]) -> None:
    """Writes the next checkpoint.

    Args:
        root: the folder of all of them.
        fs: where that is.
        cache: a folder here, for what is to be copied there.
        status: how far training has come.
        save: writes variables into a folder here.
    """
    number = max(numbers(root, fs), default=-1) + 1
    target = f"{root}/{_PREFIX}.{number}"
    aside = f"{target}.tmp"
    fs.delete(aside)
    if not fs.need_upload_download():
        _fill(Path(aside), status, save)
    else:
        here = Path(cache) / f"{_PREFIX}.{number}.saved"
        with _emptied(here):
            _fill(here, status, save)
            fs.mkdirs(root)
            fs.upload(str(here), aside)
    fs.mv(aside, target)


def _fill(folder: Path, status: TrainStatus, save: Callable[[Path], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder)
    (folder / STATUS).write_text(status.to_text(), encoding="utf-8")


def read(
    root: str, fs: FS, cache: str, trainer_id: int, load: Callable[[Path], None]
) -> TrainStatus | None:
    """Reads the newest checkpoint; returns how far training had come, None where there is none.

    Args:
        root: the folder of all of them.
        fs: where that is.
        cache: a folder here, for what is copied from there.
        trainer_id: who reads: several trainers of a machine may have one cache.
        load: reads variables from a folder here.

    Raises:
        SavedError: it is damaged, or does not fit.
    """
    number = max(numbers(root, fs), default=-1)
    if number < 0:
        return None
    source = f"{root}/{_PREFIX}.{number}"
    if not fs.need_upload_download():
        return _status(Path(source), load)
    here = Path(cache) / f"{_PREFIX}.{number}.load.{trainer_id}"
    with _emptied(here):
        fs.download(source, str(here))
        return _status(here, load)


def _status(folder: Path, load: Callable[[Path], None]) -> TrainStatus:
    path = folder / STATUS
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "the checkpoint is damaged; an older one may be whole"
        raise SavedError(f"{path} cannot be read: {error}", hint=hint) from error
    status = TrainStatus.from_text(text, str(path))
    load(folder)
    return status


def clean(root: str, fs: FS, keep: int) -> None:
    """Deletes all checkpoints but the newest, and what killed processes have left."""
    for number in numbers(root, fs)[:-keep]:
        fs.delete(f"{root}/{_PREFIX}.{number}")
    for name in fs.list_dirs(root):
        if name.startswith(f"{_PREFIX}.") and name.endswith(".tmp"):
            fs.delete(f"{root}/{name}")


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Gives a folder that is empty at first, and gone afterwards."""
    _remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
