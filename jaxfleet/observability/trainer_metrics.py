"""Metrics of trainers, and of the ranks of collective jobs, as Prometheus's client exports them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainerMetrics:
    """Metrics of a trainer.

    Attributes:
        step: the last step that it sent anything for.
        silent_s: seconds since its last message.
        late_s: cumulative delay of its steps behind the first trainer; None if unknown.
        own_s: cumulative time between a message to it and its next step.
        is_lost: it was silent for longer than peers may be.
        joins: how many processes with its number have come.
        resident_bytes: its resident memory; 0 if unknown.
        scalars: the scalar metrics of its step `scalar_step`.
        is_connected: its connection has not ended, or its heartbeats still arrive on another.
    """

    number: int
    step: int
    silent_s: float
    late_s: float | None
    doing: str
    has_left: bool
    own_s: float = 0.0
    is_lost: bool = False
    joins: int = 1
    resident_bytes: int = 0
    scalar_step: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)
    is_connected: bool = True


_OF_TRAINERS = {
    "step": ("trainer_step", "The last step that a trainer sent anything for."),
    "silent_s": ("trainer_silent_seconds", "Seconds since the last message of a trainer."),
    "has_left": ("trainer_left", "1 once a trainer has left."),
    "is_connected": ("trainer_connected", "0 while a trainer has no open connection."),
    "is_lost": ("trainer_lost", "1 while a trainer is silent for longer than it may be."),
    "resident_bytes": ("trainer_resident_bytes", "Resident memory of a trainer."),
    "scalar_step": ("trainer_scalar_step", "The step of a trainer's scalar metrics."),
}


def trainer_families(core: Any, trainers: Sequence[TrainerMetrics]) -> Iterator[Any]:
    """Yields the metrics of trainers; `core` is `prometheus_client.metrics_core`."""
    for key, (name, text) in _OF_TRAINERS.items():
        values = {str(one.number): float(getattr(one, key)) for one in trainers}
        yield labelled(core.GaugeMetricFamily, name, text, "trainer", values)
    late = {str(one.number): one.late_s for one in trainers if one.late_s is not None}
    text = "Seconds after the first of all that a trainer came to its steps, added up."
    yield labelled(core.CounterMetricFamily, "trainer_late_seconds", text, "trainer", late)
    own = {str(one.number): one.own_s for one in trainers}
    text = "Seconds from an answer to a trainer until its next step, added up."
    yield labelled(core.CounterMetricFamily, "trainer_own_seconds", text, "trainer", own)
    joins = {str(one.number): one.joins for one in trainers}
    text = "Processes with a trainer's number that have come."
    yield labelled(core.CounterMetricFamily, "trainer_joins", text, "trainer", joins)
    text = "A scalar metric of a trainer's step."
    scalars = core.GaugeMetricFamily("jaxfleet_trainer_scalar", text, labels=["trainer", "name"])
    for one in trainers:
        for name, value in one.scalars.items():
            scalars.add_metric([str(one.number), name], value)
    yield scalars
    doing = core.InfoMetricFamily("jaxfleet_trainer_doing", "What a trainer last reported to do.",
                                  labels=["trainer"])  # fmt: skip
    for one in trainers:
        doing.add_metric([str(one.number)], {"doing": one.doing})
    yield doing


def ending_families(core: Any, *, is_ended: bool, is_failed: bool) -> Iterator[Any]:
    """Yields the metrics by which the end of a process differs from its death."""
    text = "1 once the process has ended its work and is about to end."
    yield core.GaugeMetricFamily("jaxfleet_ended", text, value=float(is_ended))
    text = "1 once the process has ended with an error."
    yield core.GaugeMetricFamily("jaxfleet_failed", text, value=float(is_failed))


def labelled(
    family: Any, name: str, text: str, label: str, values: Mapping[str, float | int]
) -> Any:
    """Returns a metric with a value for each label."""
    found = family(f"jaxfleet_{name}", text, labels=[label])
    for value, number in values.items():
        found.add_metric([value], number)
    return found
