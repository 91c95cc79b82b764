"""What must hold where trainers lease samples: docs/relaxed-modes.md, "Train on every sample once".

The gradient of a sample is 1 at a place of its own, so a value shows how often it was applied.
"""

from collections.abc import Iterator

import numpy as np

from jaxfleet.testing.simulation.pushes import times_of_samples
from jaxfleet.testing.simulation.run import Run
from jaxfleet.testing.simulation.schedule import Schedule
from jaxfleet.testing.simulation.workload import HITS


def broken_leases(run: Run) -> Iterator[str]:
    """Yields the promises about samples that a run breaks."""
    for trainer, record in enumerate(run.trainers):
        if (lag := record.lags.get("max", 0)) > record.lags.get("bound", 0):
            yield f"trainer {trainer} reports that its values lacked {lag} steps"
    # No trainer may have seen the end of the data; those that have it end without a lost server.
    if not any(record.final for record in run.trainers) or run.schedule.loses_server:
        return
    has_restarted = any(end.starts > 1 for end in run.servers)
    if run.schedule.mode.changes and has_restarted:
        return  # one that is lost before its first checkpoint after a change cannot go on
    lost = run.schedule.lost_trainers + len(run.errors)
    yield from _on_server_0(run, lost)
    if not (run.schedule.has_silence or (lost and has_restarted)):
        yield from _on_others(run, lost)


def _on_server_0(run: Run, lost: int) -> Iterator[str]:
    schedule, first = run.schedule, run.servers[0]
    is_blurred = schedule.mode.communication in {"geo", "half_async"}
    shows_twice = not (is_blurred and schedule.has_silence)
    for counts in [_counts(run, 0, leaf) for leaf in HITS if leaf in first.values]:
        if not (lost and first.starts > 1):  # those of a lost one are free again, at the end too
            yield from _once(counts, schedule, "server 0")
        if first.data and shows_twice:
            yield from _reported(counts, first.data)


def _on_others(run: Run, lost: int) -> Iterator[str]:
    schedule = run.schedule
    most = schedule.mode.period * lost
    for server, end in enumerate(run.servers):
        if end.error is not None and not lost:
            continue
        for leaf in (leaf for leaf in HITS if server and leaf in end.values):
            yield from _nearly_once(_counts(run, server, leaf), most, f"server {server}: {leaf}")
        for key, row in end.rows.items():
            counts = times_of_samples(schedule.mode, row)
            yield from _nearly_once(counts, 2 * most, f"server {server}: row {key}")


def _counts(run: Run, server: int, leaf: str) -> np.ndarray:
    return times_of_samples(run.schedule.mode, run.servers[server].values[leaf])


def _once(counts: np.ndarray, schedule: Schedule, where: str) -> Iterator[str]:
    """Server 0 applies each sample once; twice only that of a trainer that was silent and lives."""
    for sample in np.flatnonzero(counts != 1):
        if not (schedule.has_silence and counts[sample] > 1):
            yield f"{where} at the end has applied sample {sample} {counts[sample]:g} times"


def _reported(counts: np.ndarray, data: dict[str, int]) -> Iterator[str]:
    told = {name: data[name] for name in ("once", "twice", "never")}
    true = {"once": counts == 1, "twice": counts > 1, "never": counts == 0}
    found = {name: int(which.sum()) for name, which in true.items()}
    if told != found:
        yield f"server 0 reports the samples {told}, and its values show {found}"


def _nearly_once(counts: np.ndarray, most: int, where: str) -> Iterator[str]:
    """The others apply each once, but for the steps of the last message of a lost trainer."""
    differ = np.flatnonzero(counts != 1)
    if len(differ) > most:
        times = ", ".join(f"{sample}: {counts[sample]:g} times" for sample in differ)
        yield f"{where} at the end has not applied each sample once: {times}"
