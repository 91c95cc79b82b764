"""Reads the environment: the only module that does.

Every variable is listed here with what it means; everything else takes values as arguments.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """Holds what the environment asked for.

    Attributes:
        dump_dir: `JAXFLEET_DUMP_DIR`; where every pipeline writes what its passes did.
        dump_source: `JAXFLEET_DUMP_SOURCE`; `1` adds the user's source lines to those dumps.
    """

    dump_dir: Path | None
    dump_source: bool


def read_environment() -> Environment:
    """Returns the environment's settings, as they are now."""
    dump_dir = os.environ.get("JAXFLEET_DUMP_DIR")
    return Environment(
        dump_dir=Path(dump_dir) if dump_dir else None,
        dump_source=os.environ.get("JAXFLEET_DUMP_SOURCE", "0") not in {"", "0"},
    )
