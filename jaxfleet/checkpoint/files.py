"""Files of a checkpoint: their names, atomic files and folders, and JSON with a checksum."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from msgspec import ValidationError, convert

from jaxfleet.checkpoint.manifest import Count, Plain
from jaxfleet.errors import CheckpointError

MANIFEST = "checkpoint.json"
PART_MANIFEST = "part.json"
DATA = "data"
TEMPORARY = "tmp-"
_PART_FOLDER = re.compile(r"part-[A-Za-z0-9_.~%-]{1,180}-[0-9a-f]{8}")


def unique(prefix: str) -> str:
    """Returns an unused name."""
    return f"{prefix}-{secrets.token_hex(4)}"


def part_folder(part: str) -> str:
    """Returns a new name for a part's folder.

    Each save has its own, so that the parts of the older checkpoint stay until the commit.
    """
    if is_part(name := unique(f"part-{quote(part, safe='', errors='replace')}")):
        return name
    raise CheckpointError(f"no part can be called {part!r}", hint="give it a short name")


def is_part(name: str) -> bool:
    """Whether a name is a part's folder; without a `/`, so that it stays within the checkpoint."""
    return _PART_FOLDER.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether a name may occur in a checkpoint's folder."""
    return name == MANIFEST or is_part(name) or name.startswith(TEMPORARY)


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Yields a new folder beside `final`, renamed to it when the block succeeds.

    Its contents are synced to disk before the rename. If the block fails, the folder is removed.
    """
    stage = final.parent / f"{TEMPORARY}{final.name}"
    stage.mkdir()
    try:
        yield stage
        sync_tree(stage)
        stage.rename(final)
        sync(final.parent)
    except BaseException:  # also after Ctrl-C
        remove(stage)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file atomically.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
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
    """Removes a file or a folder as far as possible.

    Leftovers do no harm, and the next save tries again to remove them.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_empty(folder: Path) -> None:
    """Removes a folder if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def entries(folder: Path) -> tuple[str, ...]:
    """Returns the names in a folder, sorted; none if the folder does not exist.

    Raises:
        OSError: the path is not a folder, or is not readable.
    """
    try:
        return tuple(sorted(os.listdir(folder)))  # noqa: PTH208  # names, not paths
    except FileNotFoundError:
        return ()


def measure(folder: Path) -> tuple[int, int]:
    """Returns the number of files under a folder, and their total bytes."""
    sizes = [
        os.stat(f"{at}/{name}").st_size  # noqa: PTH116  # paths take half as long again
        for at, _, names in os.walk(folder)
        for name in names
    ]
    return len(sizes), sum(sizes)


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents, and waits until the names of new ones are on disk.

    Raises:
        OSError: one cannot be created.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Waits until a folder and everything under it are on disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FORMAT = "jaxfleet checkpoint"
VERSION = 1
MAX_BYTES = 256 << 20  # a manifest of two million blocks; no file of ours is larger
DAMAGED = "the checkpoint is damaged: restore another one"


@dataclass(frozen=True)
class _Sealed:
    """The outer fields; those with a default may have another type in a later version."""

    format: str
    version: Count
    sha256: object = None
    content: object = None


def write_sealed(path: Path, content: Mapping[str, object]) -> str:
    """Writes a file atomically, and returns the checksum of its content."""
    sha256 = _digest(content)
    sealed = {"format": FORMAT, "version": VERSION, "sha256": sha256, "content": content}
    replace_file(path, json.dumps(sealed, indent=1, allow_nan=False, default=vars).encode())
    return sha256


Record = TypeVar("Record")


def read_sealed(path: Path, kind: type[Record]) -> tuple[Record, str]:
    """Returns a file's content as a record, and its checksum.

    Raises CheckpointError if it is missing, too new, not such a record, or does not match its
    checksum.
    """
    try:
        return _unsealed(path, kind)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path}: {error.strerror}", hint=DAMAGED) from error
    except (ValueError, ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", hint=DAMAGED) from error


def _unsealed(path: Path, kind: type[Record]) -> tuple[Record, str]:
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"it has {size} bytes, and no manifest is so long")
    sealed = convert(json.loads(path.read_bytes()), _Sealed)
    if sealed.format != FORMAT:
        raise ValueError(f"its format is not `{FORMAT}`")
    if sealed.version != VERSION:
        what = f"{path} has version {sealed.version} of the format"
        hint = "read it with the jaxfleet that wrote it, or a newer one"
        raise CheckpointError(f"{what}; this jaxfleet reads version {VERSION}", hint=hint)
    content = convert(sealed.content, dict[str, object])
    if (sha256 := _digest(content)) != sealed.sha256:
        raise ValueError("its content does not match its checksum")
    return convert(content, kind), sha256


def _digest(content: Mapping[str, object]) -> str:
    """Returns the checksum of plain data, which may contain records."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=vars)
    return hashlib.sha256(text.encode()).hexdigest()


def check_facts(step: int, facts: Mapping[str, Plain] | None) -> dict[str, Plain]:
    """Checks the step, and returns facts that survive a round trip through JSON.

    Raises:
        CheckpointError: the facts would not, or the step is negative.
    """
    if step < 0:
        raise CheckpointError(f"a checkpoint of step {step}", hint="steps are numbered from 0")
    given = dict(facts or {})
    try:
        back = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    else:
        if back == given:
            return given
        reason = f"{given} would come back as {back}"
    hint = "facts are None, bool, int, finite float, str, lists and dicts of them, with str keys"
    raise CheckpointError(f"facts of a checkpoint must be plain data: {reason}", hint=hint)
