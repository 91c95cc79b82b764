"""Numbered, atomic checkpoints of the collective fleet, with a TrainStatus.

::

    <path>/__paddle_fleet_checkpoint__.7/_paddle_fleet_param__    all persistable variables
                                         fleet_train_status       {"epoch_no": 3}

A folder is written as `<name>.tmp` and renamed when it is complete; names with another dot are not
checkpoints, so remains of a killed process are ignored.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxfleet.cluster.filesystems import FS
from jaxfleet.errors import SavedError


class TrainStatus:
    """The progress of a training.

    Args:
        epoch_no: the last completed epoch; -1 before the first.
    """

    def __init__(self, epoch_no: int = -1) -> None:
        self._epoch_no = epoch_no

    def next(self) -> int:
        """Returns the epoch to continue with."""
        return self._epoch_no + 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainStatus) and other._epoch_no == self._epoch_no

    def __hash__(self) -> int:
        return hash(self._epoch_no)

    def __repr__(self) -> str:
        return f"TrainStatus({self._epoch_no})"

    def to_text(self) -> str:
        """Returns the text stored in a checkpoint."""
        return json.dumps({"epoch_no": self._epoch_no})

    @classmethod
    def from_text(cls, text: str, where: str) -> "TrainStatus":
        """Parses the text stored in a checkpoint; SavedError if it is invalid."""
        try:
            plain: Any = json.loads(text)
            return cls(int(plain["epoch_no"]))
        except (ValueError, KeyError, TypeError) as error:
            hint = "the checkpoint is damaged; an older one may be whole"
            raise SavedError(f"{where} does not say how far training came", hint=hint) from error


PARAMS = "_paddle_fleet_param__"
STATUS = "fleet_train_status"
_PREFIX = "__paddle_fleet_checkpoint__"
_NAME = re.compile(rf"{_PREFIX}\.(\d+)")


def numbers(root: str, fs: FS) -> list[int]:
    """Returns the sorted numbers of the checkpoints in a folder."""
    found = [_NAME.fullmatch(name) for name in fs.list_dirs(root)]
    return sorted(int(match[1]) for match in found if match)


def write(root: str, fs: FS, cache: str, status: TrainStatus, save: Callable[[Path], None]) -> None:
    """Writes the next checkpoint to a root folder, by way of a local cache folder.

    `save` writes the variables into a local folder.
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
    """Reads the newest checkpoint; returns the progress of the training, None without any.

    `trainer_id` separates the downloads of trainers that share a cache. `load` reads variables from
    a local folder. Raises SavedError if the checkpoint is damaged or does not match the program.
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
    """Deletes all but the newest `keep` checkpoints, and the remains of killed processes."""
    for number in numbers(root, fs)[:-keep]:
        fs.delete(f"{root}/{_PREFIX}.{number}")
    for name in fs.list_dirs(root):
        if name.startswith(f"{_PREFIX}.") and name.endswith(".tmp"):
            fs.delete(f"{root}/{name}")


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Creates an empty folder, and deletes it afterwards."""
    _remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
