"""Metrics of a server: snapshots, and their export to Prometheus.

The server's own thread publishes snapshots; a scrape returns the newest, so no outside request
touches the server's state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.observability.metrics_server import Exporter
from jaxfleet.observability.trainer_metrics import (
    TrainerMetrics,
    ending_families,
    labelled,
    trainer_families,
)
from jaxfleet.transport.messages import Plain


@dataclass(frozen=True)
class ServerMetrics:
    """Metrics of a server; its counters are those of `step.stats()`.

    Attributes:
        resident_bytes: its resident memory; 0 if unknown.
        started: its start as a Unix time, which another process has another of.
        job_restarts: how often the launch started the whole job again.
        is_ended: it has ended its work, and its process is about to end.
        is_failed: it has ended with an error.
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
    is_ended: bool = False
    is_failed: bool = False


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


class MetricsExporter(Exporter):
    """Exports a server's newest snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self._newest: ServerMetrics | None = None

    def publish(self, newest: ServerMetrics) -> None:
        """Stores a newer snapshot; called by the server's thread."""
        self._newest = newest

    def families(self, core: Any) -> Iterator[Any]:
        newest = self._newest
        if newest is None:
            return
        for key, (name, text) in _GAUGES.items():
            if key == "saved" and newest.counted.get(key) is None:
                continue  # there is no checkpoint yet
            value = _number(newest.counted, key)
            yield core.GaugeMetricFamily(f"jaxfleet_{name}", text, value=value)
        for key, (name, text) in _COUNTERS.items():
            value = _number(newest.counted, key)
            yield core.CounterMetricFamily(f"jaxfleet_{name}", text, value=value)
        rows = sum(_number(newest.counted, key) for key in ("rows", "table_rows"))
        text = "Rows of sparse gradients that optimizer blocks and tables applied."
        yield core.CounterMetricFamily("jaxfleet_applied_rows", text, value=rows)
        text = "The server's start, as a Unix time."
        name = "jaxfleet_server_start_time_seconds"
        yield core.GaugeMetricFamily(name, text, value=newest.started)
        text = "How often the launch started the whole job again."
        yield core.GaugeMetricFamily("jaxfleet_job_restarts", text, value=newest.job_restarts)
        yield from ending_families(core, is_ended=newest.is_ended, is_failed=newest.is_failed)
        text = "Resident memory of the server."
        yield core.GaugeMetricFamily("jaxfleet_resident_bytes", text, value=newest.resident_bytes)
        yield _bytes(core, "received", "came", newest.received_bytes)
        yield _bytes(core, "sent", "went", newest.sent_bytes)
        yield labelled(core.CounterMetricFamily, "messages", "Messages that came.", "kind",
                        newest.messages)  # fmt: skip
        yield from trainer_families(core, newest.trainers)
        yield from _of_tables(core, newest)


def _of_tables(core: Any, newest: ServerMetrics) -> Iterator[Any]:
    tables = newest.counted.get("tables")
    if not isinstance(tables, Mapping):
        return
    by_name: dict[str, dict[str, float]] = {}
    for table, counted in tables.items():
        assert isinstance(counted, Mapping)
        for name in counted:
            by_name.setdefault(name, {})[table] = _number(counted, name)
    for name, values in by_name.items():
        text = f"`{name}` of each table, as step.stats() has it."
        yield labelled(core.GaugeMetricFamily, f"table_{name}", text, "table", values)


def _bytes(core: Any, name: str, verb: str, value: int) -> Any:
    text = f"Bytes of arrays that {verb}."
    return core.CounterMetricFamily(f"jaxfleet_{name}_bytes", text, value=value)


def _number(counted: Mapping[str, Any], key: str) -> float:
    value = counted.get(key, 0)
    return float(value) if isinstance(value, int | float) else 0.0
