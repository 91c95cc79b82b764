"""Numbered checkpoints of the collective fleet, written atomically.

::

    <root>/__paddle_fleet_checkpoint__.7/_paddle_fleet_param__    all persistable variables
                                         fleet_train_status       {"epoch_no": 3}

A folder is written as `<name>.tmp` and renamed when it is complete; names with another dot are
not checkpoints, so remains of a killed process are ignored.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxfleet.checkpoint.files import make_folder, sync, sync_tree
from jaxfleet.cluster.filesystems import FS
from jaxfleet.errors import SavedError

PARAMS = "_paddle_fleet_param__"
_STATUS = "fleet_train_status"
PREFIX = "__paddle_fleet_checkpoint__"
_NAME = re.compile(rf"{PREFIX}\.(\d+)")


class TrainStatus:
    """The progress of a training: the last completed epoch, -1 before the first."""

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


def checkpoint_numbers(root: str, fs: FS) -> list[int]:
    """Returns the sorted numbers of the checkpoints in a folder."""
    found = [_NAME.fullmatch(name) for name in fs.list_dirs(root)]
    return sorted(int(match[1]) for match in found if match)


def write_checkpoint(
    root: str, fs: FS, cache: str, status: TrainStatus, save: Callable[[Path], None]
) -> None:
    """Writes the next checkpoint to a root folder, by way of a local cache folder.

    `save` writes the variables into a local folder.
    """

    def fill(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save(folder)
        text = json.dumps({"epoch_no": status._epoch_no})
        (folder / _STATUS).write_text(text, encoding="utf-8")
        sync_tree(folder)

    number = max(checkpoint_numbers(root, fs), default=-1) + 1
    target = f"{root}/{PREFIX}.{number}"
    aside = f"{target}.tmp"
    fs.delete(aside)
    is_here = not fs.need_upload_download()
    if is_here:
        make_folder(Path(root))
        fill(Path(aside))
    else:
        here = Path(cache) / f"{PREFIX}.{number}.saved"
        with _emptied(here):
            fill(here)
            fs.mkdirs(root)
            fs.upload(str(here), aside)
    fs.mv(aside, target)
    if is_here:  # the new name must be on disk, too, before the script deletes an older one
        sync(Path(root))


def read_checkpoint(
    root: str, fs: FS, cache: str, trainer_id: int, load: Callable[[Path], None]
) -> TrainStatus | None:
    """Reads the newest checkpoint; returns the progress of the training, None without any.

    `trainer_id` separates the downloads of trainers that share a cache. `load` reads variables from
    a local folder. Raises SavedError if the checkpoint is damaged or does not match the program.
    """
    number = max(checkpoint_numbers(root, fs), default=-1)
    if number < 0:
        return None
    source = f"{root}/{PREFIX}.{number}"
    if not fs.need_upload_download():
        return _read_from(Path(source), load)
    here = Path(cache) / f"{PREFIX}.{number}.load.{trainer_id}"
    with _emptied(here):
        fs.download(source, str(here))
        return _read_from(here, load)


def _read_from(folder: Path, load: Callable[[Path], None]) -> TrainStatus:
    path, hint = folder / _STATUS, "the checkpoint is damaged; an older one may be whole"
    try:
        plain: Any = json.loads(path.read_text(encoding="utf-8"))
        status = TrainStatus(int(plain["epoch_no"]))
    except OSError as error:
        raise SavedError(f"{path} cannot be read: {error}", hint=hint) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SavedError(f"{path} does not say how far training came", hint=hint) from error
    load(folder)
    return status


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Creates an empty folder, and deletes it afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
