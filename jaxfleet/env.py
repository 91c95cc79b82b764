"""Reads the environment: the only module that does.

Every variable is listed here with what it means; everything else takes values as arguments.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_DUMP_DIR = "JAXFLEET_DUMP_DIR"
_DUMP_SOURCE = "JAXFLEET_DUMP_SOURCE"


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
    dump_dir = os.environ.get(_DUMP_DIR)
    return Environment(
        dump_dir=Path(dump_dir) if dump_dir else None,
        dump_source=os.environ.get(_DUMP_SOURCE, "0") not in {"", "0"},
    )


@contextmanager
def dumping_to(folder: Path, *, source: bool = False) -> Iterator[None]:
    """Sets the environment's dump settings while it lasts, for this process and its children."""
    settings = {_DUMP_DIR: str(folder), _DUMP_SOURCE: "1" if source else "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
