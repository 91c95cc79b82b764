"""Environment variables: their names, typed access, and the settings of any process."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from jaxfleet.errors import StrategyError

ROLE = "TRAINING_ROLE"
ROLE_TOO = "PADDLE_TRAINING_ROLE"  # spelling in fluid's documents and collective jobs
ENDPOINTS = "PADDLE_PSERVERS_IP_PORT_LIST"
TRAINERS = "PADDLE_TRAINERS_NUM"
TRAINER_ID = "PADDLE_TRAINER_ID"
CURRENT = "PADDLE_CURRENT_ENDPOINT"
IP = "POD_IP"
PORT = "PADDLE_PORT"
JOB = "JAXFLEET_JOB"
LAUNCH_ID = "JAXFLEET_LAUNCH_ID"
SECRET_FILE = "JAXFLEET_SECRET_FILE"
INSECURE = "JAXFLEET_INSECURE"
SAVE_DIR = "JAXFLEET_SAVE_DIR"
CHECKPOINT_DIR = "JAXFLEET_CHECKPOINT_DIR"
SERVER_RETURN = "JAXFLEET_SERVERS_RETURN"
MEETING_DIR = "JAXFLEET_MEETING_DIR"
SERVER_ID = "PADDLE_PSERVER_ID"
TRAINER_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
GPUS = "FLAGS_selected_gpus"
XLA_FLAGS = "XLA_FLAGS"
RESTART = "JAXFLEET_RESTART"
JOINS = "JAXFLEET_JOINS"
SAVE_EVERY = "JAXFLEET_SAVE_EVERY"
SAVE_TO = "JAXFLEET_SAVE_TO"
SAVE_KEEP = "JAXFLEET_SAVE_KEEP"
PLATFORMS = "JAX_PLATFORMS"
OF_CLUSTERS = (
    *(ROLE, ROLE_TOO, ENDPOINTS, TRAINERS, TRAINER_ID, CURRENT, IP, PORT),
    *(JOB, SECRET_FILE, CHECKPOINT_DIR, SERVER_RETURN, TRAINER_ENDPOINTS, RESTART, JOINS),
    *(SERVER_ID, MEETING_DIR, INSECURE, SAVE_DIR, LAUNCH_ID, SAVE_EVERY, SAVE_TO, SAVE_KEEP),
)


def get(name: str) -> str:
    """Returns a variable stripped of white space; empty if unset."""
    return os.environ.get(name, "").strip()


def read_number(name: str, *, least: int, hint: str = "every process of a job needs it") -> int:
    """Returns a variable as an integer."""
    text = get(name)
    number = whole(text)
    if number is None or number < least:
        what = f"is {text!r}, not a whole number from {least} on" if text else "is not set"
        refuse(name, what, hint)
    return number


def read_seconds(name: str) -> float:
    """Returns a variable as a number of seconds, 0 if unset."""
    text = get(name)
    try:
        seconds = float(text or 0.0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        refuse(name, f"is {text!r}, not a time", "it is a number of seconds, such as 60")
    return seconds


def whole(text: str) -> int | None:
    """Returns the value of a string of digits, None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def refuse(name: str, what: str, hint: str) -> NoReturn:
    """Raises the error of an invalid or missing variable."""
    raise StrategyError(f"environment variable {name} {what}", hint=hint)


_DUMP_DIR = "JAXFLEET_DUMP_DIR"
_DUMP_SOURCE = "JAXFLEET_DUMP_SOURCE"
_DUMP_ONLY = "JAXFLEET_DUMP_UNTIL_COMPILED"
_DUMP_MEASURE = "JAXFLEET_DUMP_MEASURE"
_CACHE_DIR = "JAXFLEET_CACHE_DIR"
_TRACE_DIR = "JAXFLEET_TRACE_DIR"
_PROGRESS = "JAXFLEET_PROGRESS"
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
        dump_measure: `JAXFLEET_DUMP_MEASURE`; how many calls of a step are timed for its dump.
    """

    dump_dir: Path | None
    dump_source: bool
    dump_until_compiled: bool = False
    dump_measure: int = 0


def read_environment() -> Environment:
    """Returns the current settings."""
    return Environment(
        dump_dir=Path(get(_DUMP_DIR)) if get(_DUMP_DIR) else None,
        dump_source=get(_DUMP_SOURCE) not in {"", "0"},
        dump_until_compiled=get(_DUMP_ONLY) not in {"", "0"},
        dump_measure=_measured_calls(),
    )


def _measured_calls() -> int:
    hint = "it is the number of calls to time, such as 10"
    return read_number(_DUMP_MEASURE, least=0, hint=hint) if get(_DUMP_MEASURE) else 0


@contextmanager
def dumping_to(
    folder: Path, *, source: bool = False, until_compiled: bool = False, measure: int = 0
) -> Iterator[None]:
    """Context that sets the dump variables, for this process and its children."""
    settings = {
        _DUMP_DIR: str(folder),
        _DUMP_SOURCE: "1" if source else "0",
        _DUMP_ONLY: "1" if until_compiled else "0",
        _DUMP_MEASURE: str(measure),
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


def read_shows_progress() -> bool:
    """Returns whether long work shows its progress: unless `JAXFLEET_PROGRESS` is `0`."""
    return get(_PROGRESS) != "0"


def read_metrics_port(number: int) -> int | None:
    """Returns the port of the metrics of a server or rank, None if it serves none.

    Args:
        number: its own: `JAXFLEET_METRICS_PORT` is the port of number 0; the others' follow.
    """
    if not get(_METRICS_PORT):
        return None
    port = read_number(_METRICS_PORT, least=1, hint="9464 is Prometheus's usual one") + number
    if port > _LAST_PORT:
        refuse(_METRICS_PORT, f"makes port {port} that of number {number}", "the last is 65535")
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
