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
            last = undisturbed.trainers[0].final
            yield from _differences(record.final, last, f"trainer {trainer} at its end")
    for server, (end, other) in enumerate(zip(run.servers, undisturbed.servers, strict=True)):
        if well and end.error is None:
            yield from _differences(end.values, other.values, f"server {server} at its end")


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
