"""Metrics of a server: snapshots, their export to Prometheus, and an HTTP server for them.

The server's own thread publishes snapshots; a scrape returns the newest, so no outside request
touches the server's state.
"""

import asyncio
import hmac
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.transport.messages import Plain


@dataclass(frozen=True)
class TrainerMetrics:
    """Metrics of a trainer.

    Attributes:
        step: the last step that it sent anything for.
        silent_s: seconds since its last message.
        late_s: cumulative delay of its steps behind the first trainer.
        own_s: cumulative time between a message to it and its next step.
        is_lost: it was silent for longer than peers may be.
        joins: how many processes with its number have come.
        resident_bytes: its resident memory; 0 if unknown.
        scalars: the scalar metrics of its step `scalar_step`.
    """

    number: int
    step: int
    silent_s: float
    late_s: float
    doing: str
    has_left: bool
    own_s: float = 0.0
    is_lost: bool = False
    joins: int = 1
    resident_bytes: int = 0
    scalar_step: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerMetrics:
    """Metrics of a server; its counters are those of `step.stats()`.

    Attributes:
        resident_bytes: its resident memory; 0 if unknown.
        started: its start as a Unix time, which another process has another of.
        job_restarts: how often the launch started the whole job again.
    """

    name: str
    counted: Mapping[str, Plain]
    messages: Mapping[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    sent_bytes: int = 0
    trainers: tuple[TrainerMetrics, ...] = ()
    resident_bytes: int = 0
    started: float = 0.0
    job_restarts: int = 0


# By the server's own name: the metric's name and description.
_GAUGES = {
    "step": ("server_step", "The last step applied; -1 without a state."),
    "queued_bytes": ("queued_bytes", "Bytes of gradients that wait."),
    "saved": ("checkpoint_step", "Trainer 0's step in the last checkpoint of the server's own."),
}
_COUNTERS = {
    "block_s": ("block_seconds", "Seconds spent in optimizer blocks."),
    "duplicates": ("duplicate_messages", "Messages that came twice and counted once."),
    "errors": ("errors", "Errors that were sent to trainers."),
    "rejected": ("rejected_frames", "Frames that were no messages."),
    "saves": ("saves", "Checkpoints of which trainers had the server write its part."),
}
_OF_TRAINERS = {
    "step": ("trainer_step", "The last step that a trainer sent anything for."),
    "silent_s": ("trainer_silent_seconds", "Seconds since the last message of a trainer."),
    "has_left": ("trainer_left", "1 once a trainer has left."),
    "is_lost": ("trainer_lost", "1 while a trainer is silent for longer than it may be."),
    "resident_bytes": ("trainer_resident_bytes", "Resident memory of a trainer."),
    "scalar_step": ("trainer_scalar_step", "The step of a trainer's scalar metrics."),
}


@dataclass(frozen=True)
class ExportedMetric:
    """Description of a metric: its name, type, text, and its label, if it has one."""

    name: str
    kind: str
    text: str
    label: str | None


def exported() -> list[ExportedMetric]:
    """Returns the metrics that every server exports; those of tables depend on the job."""
    exporter = MetricsExporter()
    trainer = TrainerMetrics(0, 0, 0.0, 0.0, "", has_left=False)
    exporter.publish(ServerMetrics("0", {}, messages={"push": 0}, trainers=(trainer,)))
    found = []
    for family in exporter.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        label = next(iter(getattr(family, "_labelnames", ())), None)
        name = f"{family.name}{suffix}"
        found.append(ExportedMetric(name, family.type, family.documentation, label))
    return found


class MetricsExporter:
    """A collector for Prometheus's client that exports a server's newest snapshot."""

    def __init__(self) -> None:
        self._figures: ServerMetrics | None = None
        self._server: MetricsServer | None = None

    def publish(self, figures: ServerMetrics) -> None:
        """Stores a newer snapshot; called by the server's thread."""
        self._figures = figures

    def start(self, host: str, port: int, token: str | None = None) -> int:
        """Serves metrics in a thread; returns the port.

        Port 0 selects a free one. Requests need the bearer token, if given.
        """
        client = _client()
        registry = client.CollectorRegistry()
        registry.register(self)
        server = MetricsServer(
            lambda: client.generate_latest(registry),
            content_type=client.CONTENT_TYPE_LATEST,
            token=token,
        )
        found = server.start(host, port)
        self._server = server
        return found

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def describe(self) -> Iterator[Any]:
        """Yields nothing: the metrics depend on the job."""
        yield from ()

    def collect(self) -> Iterator[Any]:
        figures = self._figures
        if figures is None:
            return
        core = _client().metrics_core
        for key, (name, text) in _GAUGES.items():
            if key == "saved" and figures.counted.get(key) is None:
                continue  # there is no checkpoint yet
            value = _number(figures.counted, key)
            yield core.GaugeMetricFamily(f"jaxfleet_{name}", text, value=value)
        for key, (name, text) in _COUNTERS.items():
            value = _number(figures.counted, key)
            yield core.CounterMetricFamily(f"jaxfleet_{name}", text, value=value)
        rows = sum(_number(figures.counted, key) for key in ("rows", "table_rows"))
        text = "Rows of sparse gradients that optimizer blocks and tables applied."
        yield core.CounterMetricFamily("jaxfleet_applied_rows", text, value=rows)
        text = "The server's start, as a Unix time."
        name = "jaxfleet_server_start_time_seconds"
        yield core.GaugeMetricFamily(name, text, value=figures.started)
        text = "How often the launch started the whole job again."
        yield core.GaugeMetricFamily("jaxfleet_job_restarts", text, value=figures.job_restarts)
        text = "Resident memory of the server."
        yield core.GaugeMetricFamily("jaxfleet_resident_bytes", text, value=figures.resident_bytes)
        yield _bytes(core, "received", "came", figures.received_bytes)
        yield _bytes(core, "sent", "went", figures.sent_bytes)
        yield _labelled(core.CounterMetricFamily, "messages", "Messages that came.", "kind",
                        figures.messages)  # fmt: skip
        yield from _of_trainers(core, figures)
        yield from _of_tables(core, figures)


def _of_trainers(core: Any, figures: ServerMetrics) -> Iterator[Any]:
    for key, (name, text) in _OF_TRAINERS.items():
        values = {str(one.number): float(getattr(one, key)) for one in figures.trainers}
        yield _labelled(core.GaugeMetricFamily, name, text, "trainer", values)
    late = {str(one.number): one.late_s for one in figures.trainers}
    text = "Seconds after the first of all that a trainer came to its steps, added up."
    yield _labelled(core.CounterMetricFamily, "trainer_late_seconds", text, "trainer", late)
    own = {str(one.number): one.own_s for one in figures.trainers}
    text = "Seconds from an answer to a trainer until its next step, added up."
    yield _labelled(core.CounterMetricFamily, "trainer_own_seconds", text, "trainer", own)
    joins = {str(one.number): one.joins for one in figures.trainers}
    text = "Processes with a trainer's number that have come."
    yield _labelled(core.CounterMetricFamily, "trainer_joins", text, "trainer", joins)
    text = "A scalar metric of a trainer's step."
    scalars = core.GaugeMetricFamily("jaxfleet_trainer_scalar", text, labels=["trainer", "name"])
    for one in figures.trainers:
        for name, value in one.scalars.items():
            scalars.add_metric([str(one.number), name], value)
    yield scalars
    doing = core.InfoMetricFamily("jaxfleet_trainer_doing", "What a trainer last reported to do.",
                                  labels=["trainer"])  # fmt: skip
    for one in figures.trainers:
        doing.add_metric([str(one.number)], {"doing": one.doing})
    yield doing


def _of_tables(core: Any, figures: ServerMetrics) -> Iterator[Any]:
    tables = figures.counted.get("tables")
    if not isinstance(tables, Mapping):
        return
    by_name: dict[str, dict[str, float]] = {}
    for table, counted in tables.items():
        assert isinstance(counted, Mapping)
        for name in counted:
            by_name.setdefault(name, {})[table] = _number(counted, name)
    for name, values in by_name.items():
        text = f"`{name}` of each table, as step.stats() has it."
        yield _labelled(core.GaugeMetricFamily, f"table_{name}", text, "table", values)


def _labelled(
    family: Any, name: str, text: str, label: str, values: Mapping[str, float | int]
) -> Any:
    found = family(f"jaxfleet_{name}", text, labels=[label])
    for value, number in values.items():
        found.add_metric([value], number)
    return found


def _bytes(core: Any, name: str, verb: str, value: int) -> Any:
    text = f"Bytes of arrays that {verb}."
    return core.CounterMetricFamily(f"jaxfleet_{name}_bytes", text, value=value)


def _number(counted: Mapping[str, Any], key: str) -> float:
    value = counted.get(key, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _client() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415  # an extra
    except ImportError as error:
        hint = "pip install 'jaxfleet[watch]', or unset JAXFLEET_METRICS_PORT"
        raise StrategyError("metrics need prometheus_client", hint=hint) from error
    return prometheus_client


T = TypeVar("T")

_MOST = 32  # connections at a time
_LONGEST_S = 5.0  # per connection, from its first byte to the last
_REQUEST_BYTES = 8192
_START_S = 10.0
_PATHS = frozenset({"/metrics", "/"})


class MetricsServer:
    """Serves a text at `GET /metrics`, in one thread for any number of slow or idle clients.

    Prometheus's own server starts a thread for each connection, so 300 idle connections take 300
    threads. Here one event loop serves all of them: the oldest is closed if there are too many, and
    each has a few seconds (`longest_s`).
    """

    def __init__(
        self,
        text: Callable[[], bytes],
        *,
        content_type: str,
        token: str | None = None,
        longest_s: float = _LONGEST_S,
    ) -> None:
        self._text, self._content_type = text, content_type
        self._token, self._longest_s = token, longest_s
        self._open: dict[asyncio.StreamWriter, None] = {}  # in order of arrival
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def connections(self) -> int:
        return len(self._open)

    def start(self, host: str, port: int) -> int:
        """Serves in a thread; returns the port."""
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jaxfleet-metrics", daemon=True
        )
        self._thread.start()
        beginning = asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES)
        try:
            self._server = self._wait_for(beginning)
        except OSError as error:
            self.close()
            what = f"metrics cannot be served at {host}:{port}: {error.strerror}"
            raise ConnectError(what, hint="set JAXFLEET_METRICS_PORT to another port") from error
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._wait_for(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_S)
            self._loop.close()
            self._thread = None

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MOST:
            next(iter(self._open)).transport.abort()
            del self._open[next(iter(self._open))]
        try:
            async with asyncio.timeout(self._longest_s):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                writer.write_eof()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # the client left, was slow, or sent no HTTP
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()  # otherwise unread data would be buffered indefinitely

    def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, _, path = lines[0].partition(" ")
        if not self._lets_in(lines[1:]):
            return _response("401 Unauthorized", "text/plain", b"", "WWW-Authenticate: Bearer")
        if method != "GET":
            return _response("405 Method Not Allowed", "text/plain", b"", "Allow: GET")
        if path.partition(" ")[0].partition("?")[0] not in _PATHS:
            return _response("404 Not Found", "text/plain", b"metrics are at /metrics\n")
        return _response("200 OK", self._content_type, self._text())

    def _lets_in(self, fields: list[str]) -> bool:
        """Whether the header fields contain the required token, if any."""
        if self._token is None:
            return True
        for line in fields:
            name, _, value = line.partition(":")
            kind, _, shown = value.strip().partition(" ")
            if name.lower() == "authorization" and kind.lower() == "bearer":
                return hmac.compare_digest(shown.strip().encode(), self._token.encode())
        return False


def _response(status: str, content_type: str, body: bytes, *fields: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *fields,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
