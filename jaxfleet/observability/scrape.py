"""Client of a process's metrics: a parser for those that `top` shows, and the files of tokens."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from jaxfleet.env import runtime_dir
from jaxfleet.errors import ConnectError, StrategyError

PREFIX = "jaxfleet_"
TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 24
_MOST_VALUE = 1e30  # sums and rates of such values are finite


@dataclass(frozen=True)
class Sample:
    """Metrics of a server, or of a rank of a collective job, at one time.

    Attributes:
        at_s: the time, on this process's clock.
        values: by metric without its prefix; only those without labels.
        of_trainers: values by metric, for each trainer's number.
        tables: values by metric, for each table's name.
        doing: the activity that each trainer last reported.
        scalars: the scalar metrics of each trainer, by name.
    """

    at_s: float
    values: dict[str, float] = field(default_factory=dict)
    of_trainers: dict[int, dict[str, float]] = field(default_factory=dict)
    tables: dict[str, dict[str, float]] = field(default_factory=dict)
    doing: dict[int, str] = field(default_factory=dict)
    scalars: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        """The number of a rank, which is the only trainer in its metrics; None of a server."""
        return next(iter(self.of_trainers), None) if "rank_step" in self.values else None

    @property
    def kind(self) -> str:
        """The kind of process: `server` or `rank`."""
        return "rank" if "rank_step" in self.values else "server"

    def own(self, name: str) -> float | None:
        """Returns a metric that servers and ranks have, each by their kind: `step`."""
        return self.values.get(f"{self.kind}_{name}")


def scrape(address: str, token: str | None = None) -> Sample:
    """Returns the metrics of a server or rank.

    Args:
        address: `HOST:PORT` of its metrics.
        token: the bearer token of the job's metrics, if it has a secret.

    Raises:
        OSError: it does not answer within two seconds, or requires another token.
        ConnectError: the process at the address is not of a jaxfleet job.
        StrategyError: prometheus_client is not installed.
    """
    families = parser()
    with suppress(HTTPException, ValueError, KeyError):  # not HTTP, not text, or other metrics
        text = _fetch(address, token).decode()
        sample = Sample(time.monotonic())
        for name, labels, value in _metrics(families, text):
            _sort_in(sample, name, labels, value)
        if sample.own("step") is not None:
            return sample
    hint = "JAXFLEET_METRICS_PORT is another port than the one that trainers connect to"
    what = f"what answers at {address} is not a server or rank of jaxfleet's"
    raise ConnectError(what, hint=hint)


def _fetch(address: str, token: str | None) -> bytes:
    """Returns the answer of a server, which is asked without a proxy, as trainers reach it."""
    fields = {} if token is None else {"Authorization": f"Bearer {token}"}
    with closing(HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
        connection.connect()
        # The timeout of a socket is one for each read, and a server may send a byte a second.
        is_late = threading.Event()
        timer = threading.Timer(TIMEOUT_S, _hang_up, (connection.sock, is_late))
        timer.start()
        try:
            connection.request("GET", "/metrics", headers=fields)
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES)
        except (OSError, HTTPException):
            if not is_late.is_set():
                raise
        finally:
            timer.cancel()
    if is_late.is_set():
        raise TimeoutError(f"{address} did not answer within {TIMEOUT_S:g} s")
    if answer.status == HTTPStatus.UNAUTHORIZED:
        what = "the job has a secret, and its metrics a token: give --secret-file FILE"
        raise PermissionError(what)
    if answer.status != HTTPStatus.OK:
        raise HTTPException(f"status {answer.status}")  # also a redirect, which is not followed
    return text


def _hang_up(connection: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _sort_in(sample: Sample, name: str, labels: dict[str, str], value: float) -> None:
    if name == "trainer_doing_info":
        sample.doing[int(labels["trainer"])] = labels["doing"]
    elif name == "trainer_scalar":
        sample.scalars.setdefault(int(labels["trainer"]), {})[labels["name"]] = value
    elif not abs(value) <= _MOST_VALUE:
        pass  # only a trainer's own scalars may be infinite, huge or no number
    elif "trainer" in labels:
        sample.of_trainers.setdefault(int(labels["trainer"]), {})[name] = value
    elif "table" in labels:
        sample.tables.setdefault(labels["table"], {})[name] = value
    elif not labels:
        sample.values[name] = value


def _metrics(families: Any, text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in families.text_string_to_metric_families(text):
        for found in family.samples:
            if found.name.startswith(PREFIX):
                yield found.name.removeprefix(PREFIX), dict(found.labels), found.value


def parser() -> Any:
    """Returns the parser of Prometheus's client."""
    try:
        from prometheus_client import parser as found  # noqa: PLC0415  # an extra
    except ImportError as error:
        hint = "pip install 'jaxfleet[watch]'"
        raise StrategyError("metrics need prometheus_client", hint=hint) from error
    return found


def write_token(port: int, token: str) -> Path | None:
    """Writes a token to a file that only this user may read; None if there is no private folder."""
    folder = runtime_dir()
    if folder is None:
        return None
    path = folder / f"metrics-{port}"
    with suppress(OSError):
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(token)
        return path
    return None


def read_token(port: int) -> str | None:
    """Returns the token of the metrics at a port of this machine, None if unknown."""
    folder = runtime_dir()
    with suppress(OSError, UnicodeDecodeError):
        return (folder / f"metrics-{port}").read_text().strip() if folder is not None else None
    return None
