"""What must hold in jobs whose trainers leave, are lost and join while they run.

A step has twelve rows, which one to four trainers share evenly; half of them are at each of the two
places of the step, so the values are those of a job of two trainers, but for the order of sums.
"""

from collections.abc import Iterator

import numpy as np

from jaxfleet.testing.simulation.run import Run
from jaxfleet.testing.simulation.workload import HITS, STEPS, TRAINERS

_TOLERANCE = 2e-6  # of float32 sums in another order


def broken_changes(run: Run, undisturbed: Run) -> Iterator[str]:
    """Yields what differs from a job of the same trainers throughout."""
    expected = dict(undisturbed.trainers[0].seen)
    well = [n for n, record in enumerate(run.trainers) if record.final]
    for trainer, record in enumerate(run.trainers):
        for step, values in record.seen:
            where = f"trainer {trainer} at step {step}"
            yield from _differences(values, expected[step], where)
        if trainer in well:
            first = run.trainers[well[0]].final
            for leaf, value in record.final.items():
                if value.tobytes() != first[leaf].tobytes():
                    yield f"trainers {well[0]} and {trainer} end with different '{leaf}'"
            last = undisturbed.trainers[0]
            yield from _differences(record.final, last.final, f"trainer {trainer} at its end")
            yield from _other_rows(record.rows, last.rows, f"trainer {trainer} at its end")
    for server, end in run.last_ends():
        if well and end.error is None:
            yield from _differences(end.values, undisturbed.values(), f"server {server} at its end")
            for key, row in end.rows.items():
                yield from _other_rows(row, undisturbed.rows()[key], f"server {server} at its end")


def _other_rows(rows: np.ndarray | None, wanted: np.ndarray | None, where: str) -> Iterator[str]:
    if rows is None or wanted is None or np.allclose(rows, wanted, rtol=0.0, atol=_TOLERANCE):
        return
    applied = -rows.reshape(-1, STEPS, TRAINERS)
    yield f"{where} has the gradients of rows {applied.tolist()} times"


def _differences(
    values: dict[str, np.ndarray], wanted: dict[str, np.ndarray], where: str
) -> Iterator[str]:
    for leaf, value in values.items():
        if np.allclose(value, wanted[leaf], rtol=0.0, atol=_TOLERANCE):
            continue
        what = f"{where} has another '{leaf}' than with fixed trainers"
        if leaf in HITS:
            applied = -(value * TRAINERS).reshape(STEPS, TRAINERS)
            what += f": it has the rows of steps {applied.tolist()} times"
        yield what
