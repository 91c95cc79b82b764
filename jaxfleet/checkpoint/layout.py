"""Names of the files of a checkpoint. None is made of a name that somebody else chose, unquoted."""

import re
import secrets
from urllib.parse import quote

from jaxfleet.errors import CheckpointError

MANIFEST = "checkpoint.json"
PART_MANIFEST = "part.json"
DATA = "data"
TEMPORARY = "tmp-"
_PART_FOLDER = re.compile(r"part-[A-Za-z0-9_.~%-]{1,180}-[0-9a-f]{8}")


def unique(prefix: str) -> str:
    """Returns a name that nothing has yet."""
    return f"{prefix}-{secrets.token_hex(4)}"


def part_folder(part: str) -> str:
    """Returns a new name for a part's folder.

    Each save has its own, so that the parts of the older checkpoint stay until the commit.

    Raises:
        CheckpointError: the part's name is empty or too long.
    """
    if is_part(name := unique(f"part-{quote(part, safe='', errors='replace')}")):
        return name
    raise CheckpointError(f"no part can be called {part!r}", hint="give it a short name")


def is_part(name: str) -> bool:
    """Says whether this is a part's folder: it has no `/`, so it is nowhere else."""
    return _PART_FOLDER.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Says whether a checkpoint's folder may hold this."""
    return name == MANIFEST or is_part(name) or name.startswith(TEMPORARY)
