"""JSON files with a format version and a checksum of their content."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from jaxfleet.checkpoint.files import replace_file
from jaxfleet.checkpoint.manifest import Plain
from jaxfleet.checkpoint.typed_json import Fields, as_table
from jaxfleet.errors import CheckpointError

FORMAT = "jaxfleet checkpoint"
VERSION = 1
MAX_BYTES = 256 << 20  # a manifest of two million blocks; no file of ours is larger
DAMAGED = "the checkpoint is damaged: restore another one"


def write_sealed(path: Path, content: Mapping[str, object]) -> str:
    """Writes a file atomically, and returns the checksum of its content."""
    sha256 = _digest(content)
    sealed = {"format": FORMAT, "version": VERSION, "sha256": sha256, "content": content}
    replace_file(path, json.dumps(sealed, indent=1, allow_nan=False).encode())
    return sha256


def read_sealed(path: Path) -> tuple[Fields, str]:
    """Returns a file's content and its checksum.

    Raises CheckpointError if it is missing, too new, or does not match its checksum.
    """
    try:
        return _unsealed(path)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path}: {error.strerror}", hint=DAMAGED) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", hint=DAMAGED) from error


def _unsealed(path: Path) -> tuple[Fields, str]:
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"it has {size} bytes, and no manifest is so long")
    outer = as_table("it", json.loads(path.read_bytes()))
    if outer.text("format") != FORMAT:
        raise ValueError(f"its format is not `{FORMAT}`")
    if (version := outer.count("version")) != VERSION:
        what = f"{path} has version {version} of the format; this jaxfleet reads version {VERSION}"
        raise CheckpointError(what, hint="read it with the jaxfleet that wrote it, or a newer one")
    content, sha256 = outer.table("content"), outer.digest("sha256")
    if _digest(content) != sha256:
        raise ValueError("its content has another checksum than it says")
    return Fields(content), sha256


def _digest(content: Mapping[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
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
