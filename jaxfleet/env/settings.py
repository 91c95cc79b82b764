"""jaxfleet's own settings, for any process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.env.variables import get, read_number, refuse

_DUMP_DIR = "JAXFLEET_DUMP_DIR"
_DUMP_SOURCE = "JAXFLEET_DUMP_SOURCE"
_DUMP_ONLY = "JAXFLEET_DUMP_UNTIL_COMPILED"
_CACHE_DIR = "JAXFLEET_CACHE_DIR"
_TRACE_DIR = "JAXFLEET_TRACE_DIR"
_METRICS_PORT = "JAXFLEET_METRICS_PORT"
_METRICS_HOST = "JAXFLEET_METRICS_HOST"
_LAST_PORT = 65535


@dataclass(frozen=True)
class Environment:
    """Settings from the environment.

    Attributes:
        dump_dir: `JAXFLEET_DUMP_DIR`; where every pipeline dumps the programs between passes.
        dump_source: `JAXFLEET_DUMP_SOURCE`; `1` adds the user's source lines to those dumps.
        dump_until_compiled: `JAXFLEET_DUMP_UNTIL_COMPILED`; `1` ends a script at its first step.
    """

    dump_dir: Path | None
    dump_source: bool
    dump_until_compiled: bool = False


def read_environment() -> Environment:
    """Returns the current settings."""
    dump_dir = os.environ.get(_DUMP_DIR)
    return Environment(
        dump_dir=Path(dump_dir) if dump_dir else None,
        dump_source=os.environ.get(_DUMP_SOURCE, "0") not in {"", "0"},
        dump_until_compiled=os.environ.get(_DUMP_ONLY, "0") not in {"", "0"},
    )


@contextmanager
def dumping_to(
    folder: Path, *, source: bool = False, until_compiled: bool = False
) -> Iterator[None]:
    """Context that sets the dump variables, for this process and its children."""
    settings = {
        _DUMP_DIR: str(folder),
        _DUMP_SOURCE: "1" if source else "0",
        _DUMP_ONLY: "1" if until_compiled else "0",
    }
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


def read_cache_dir() -> Path | None:
    """Returns the folder of compiled functions for later processes, None if disabled.

    `JAXFLEET_CACHE_DIR` sets it (empty: disabled); the default is `jaxfleet` in the user's cache
    folder: `XDG_CACHE_HOME`, or `.cache` at home.
    """
    given = os.environ.get(_CACHE_DIR)
    if given is not None:
        return Path(given) if given else None
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "jaxfleet"
    except RuntimeError:  # a user without a home
        return None


def read_trace_dir() -> Path | None:
    """Returns the folder for the spans of all processes (`JAXFLEET_TRACE_DIR`), if set."""
    return Path(get(_TRACE_DIR)) if get(_TRACE_DIR) else None


def read_metrics_port(server: int) -> int | None:
    """Returns the port of a server's metrics, None if it serves none.

    Args:
        server: its number: `JAXFLEET_METRICS_PORT` is the port of server 0; the others' follow.
    """
    if not get(_METRICS_PORT):
        return None
    port = read_number(_METRICS_PORT, least=1, hint="9464 is Prometheus's usual one") + server
    if port > _LAST_PORT:
        refuse(_METRICS_PORT, f"makes server {server}'s port {port}", "the last is 65535")
    return port


def read_metrics_host() -> str:
    """Returns the address at which servers serve their metrics: `JAXFLEET_METRICS_HOST`.

    The default is 127.0.0.1, which only this machine reaches.
    """
    return get(_METRICS_HOST) or "127.0.0.1"


def prepend_python_path(folder: str) -> None:
    """Prepends a folder to `PYTHONPATH`, for child processes."""
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, known] if known else [folder])
