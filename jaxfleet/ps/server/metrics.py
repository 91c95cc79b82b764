"""Metrics of a server: snapshots, and their export to Prometheus.

The server's own thread publishes snapshots; a scrape returns the newest, so no outside request
touches the server's state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.errors import StrategyError
from jaxfleet.ps.server.metrics_server import MetricsServer
from jaxfleet.transport.messages import Plain


@dataclass(frozen=True)
class TrainerMetrics:
    """Metrics of a trainer.

    Attributes:
        step: the last step that it sent anything for.
        silent_s: seconds since its last message.
        late_s: cumulative delay of its steps behind the first trainer.
        own_s: cumulative time between a message to it and its next step.
    """

    number: int
    step: int
    silent_s: float
    late_s: float
    doing: str
    has_left: bool
    own_s: float = 0.0


@dataclass(frozen=True)
class ServerMetrics:
    """Metrics of a server; its counters are those of `step.stats()`."""

    name: str
    counted: Mapping[str, Plain]
    messages: Mapping[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    sent_bytes: int = 0
    trainers: tuple[TrainerMetrics, ...] = ()


# By the server's own name: the metric's name and description.
_GAUGES = {
    "step": ("server_step", "The last step applied; -1 without a state."),
    "queued_bytes": ("queued_bytes", "Bytes of gradients that wait."),
}
_COUNTERS = {
    "block_s": ("block_seconds", "Seconds spent in optimizer blocks."),
    "rows": ("applied_rows", "Rows of tables that were updated."),
    "duplicates": ("duplicate_messages", "Messages that came twice and counted once."),
    "errors": ("errors", "Errors that were sent to trainers."),
    "rejected": ("rejected_frames", "Frames that were no messages."),
}
_OF_TRAINERS = {
    "step": ("trainer_step", "The last step that a trainer sent anything for."),
    "silent_s": ("trainer_silent_seconds", "Seconds since a trainer was heard of."),
    "has_left": ("trainer_left", "1 once a trainer said bye."),
}


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

        Args:
            host: the address to listen on.
            port: 0 selects a free one.
            token: the bearer token that requests need; None for none.
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
            value = _number(figures.counted, key)
            yield core.GaugeMetricFamily(f"jaxfleet_{name}", text, value=value)
        for key, (name, text) in _COUNTERS.items():
            value = _number(figures.counted, key)
            yield core.CounterMetricFamily(f"jaxfleet_{name}", text, value=value)
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
    doing = core.InfoMetricFamily("jaxfleet_trainer_doing", "What a trainer last said that it did.",
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
