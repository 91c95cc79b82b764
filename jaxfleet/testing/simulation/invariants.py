"""What must hold in every run, and what must hold in runs whose faults a job survives."""

from collections.abc import Iterator

import numpy as np

from jaxfleet.errors import ConnectError, JaxfleetError
from jaxfleet.testing.simulation.changes import broken_changes
from jaxfleet.testing.simulation.leases import broken_leases
from jaxfleet.testing.simulation.pushes import times_applied
from jaxfleet.testing.simulation.run import Run
from jaxfleet.testing.simulation.workload import HITS, TRAINERS, Record


def broken(run: Run, undisturbed: Run) -> list[str]:
    """Returns the invariants that a run breaks; `undisturbed` is the same job without faults."""
    found = [*_endings(run), *run.waits.late, *dict.fromkeys(run.sizes.beyond), *_moves(run)]
    if run.schedule.mode.leases:
        return [*found, *broken_leases(run)]
    if run.schedule.mode.changes:
        return [*found, *broken_changes(run, undisturbed)]
    for trainer, record in enumerate(run.trainers):
        found += _of_trainer(run, trainer, record, undisturbed)
    found += _at_the_end(run, undisturbed)
    return found


def _endings(run: Run) -> Iterator[str]:
    """Every wait ends: with an answer, or with an error that jaxfleet names."""
    if run.stuck:
        yield f"the job did not end: {run.stuck}"
    for name, crash in run.crashes:
        yield f"{name} crashed with {crash!r}"
    ends = {f"trainer {trainer}": error for trainer, error in run.errors.items()}
    ends |= {f"server {n}": end.error for n, end in enumerate(run.servers) if end.error is not None}
    for name, error in ends.items():
        if not isinstance(error, JaxfleetError):
            yield f"{name} ended with {error!r}, which is not an error of jaxfleet"
        elif run.schedule.must_succeed and not _is_excused(run, name, error):
            yield f"{name} failed though the job survives these faults: {error}"


def _is_excused(run: Run, name: str, error: JaxfleetError) -> bool:
    """Whether a process may fail that others do not need."""
    schedule = run.schedule
    if schedule.mode.changes and run.lost_early:
        return True
    kind, _, number = name.partition(" ")
    if kind == "server":  # which waits for lost trainers when the others have ended
        return schedule.lost_trainers > 0 and not schedule.mode.waits
    joins = int(number) >= TRAINERS
    return joins and isinstance(error, ConnectError)  # it is told that the job has ended


def _moves(run: Run) -> Iterator[str]:
    """Trainers move together, and servers that do not stay end by themselves."""
    if len(run.counts_of_servers) > 1:
        yield f"trainers ended with {sorted(run.counts_of_servers)} servers"
    if run.schedule.mode.moves and not run.schedule.mode.changes:
        for step, counts in enumerate(zip(*(x.servers for x in run.trainers), strict=False)):
            if len(set(counts)) > 1:
                yield f"trainers did their step number {step + 1} with {counts} servers"
    if run.errors or not run.counts_of_servers:
        return  # the launch ends the servers of a job that fails, or that no trainer has ended
    count = max(run.counts_of_servers)
    for server, end in run.former:
        if server >= count and end.is_told and end.has_served and end.starts == 1:
            yield f"server {server} had to be told to end when the job had moved to others"


def _of_trainer(run: Run, trainer: int, record: Record, undisturbed: Run) -> Iterator[str]:
    mode = run.schedule.mode
    lags, expected = [], dict(undisturbed.trainers[trainer].seen)
    for step, values in record.seen:
        wanted = expected[step]
        for leaf in values if mode.is_exact else ():
            if values[leaf].tobytes() != wanted[leaf].tobytes():
                yield f"trainer {trainer} computes step {step} with another '{leaf}'"
        counts = [times_applied(mode, values[leaf], holder=trainer) for leaf in HITS]
        yield from _once(counts, f"trainer {trainer} at step {step}")
        own = min(_complete(count[:, trainer]) for count in counts)
        if mode.staleness is None:
            continue
        least = min(_complete(count[:, other]) for count in counts for other in range(TRAINERS))
        lags.append(step - 1 - least)
        if own < step - 1 - mode.staleness or lags[-1] > mode.staleness:
            what = f"trainer {trainer} computed step {step} with values that lack pushes of"
            yield f"{what} step {least + 1}: the bound is {mode.staleness}"
    if mode.staleness is not None and record.lags:
        yield from _reported(trainer, lags[record.before :], record.lags["histogram"])


def _reported(trainer: int, lags: list[int], histogram: dict[str, int]) -> Iterator[str]:
    """A reported lag is no smaller than that of the values."""
    told = sorted(int(lag) for lag, count in histogram.items() for _ in range(count))
    if len(told) != len(lags):
        yield f"trainer {trainer} reports the lags of {len(told)} steps instead of {len(lags)}"
    elif any(said < true for said, true in zip(told, sorted(lags), strict=True)):
        yield f"trainer {trainer} reports the lags {told}; those of its values are {sorted(lags)}"


def _complete(applied: np.ndarray) -> int:
    """Returns the last step up to which all pushes of a trainer are contained."""
    missing = np.flatnonzero(applied == 0)
    return int(missing[0]) if len(missing) else len(applied)


def _once(counts: list[np.ndarray], where: str) -> Iterator[str]:
    for leaf, count in zip(HITS, counts, strict=True):
        for step, trainer in np.argwhere((count != 0) & (count != 1)):
            times = _times(count[step, trainer])
            yield f"{where}: '{leaf}' has trainer {trainer}'s push of step {step + 1} {times}"


def _times(count: float) -> str:
    return "in part" if np.isnan(count) else f"{count:g} times"


def _at_the_end(run: Run, undisturbed: Run) -> Iterator[str]:
    """Servers that ended with the job have every push of every trainer that ended well, once.

    If a trainer had to end without a checkpoint, a server that dies then may lack pushes.
    """
    mode = run.schedule.mode
    well = [n for n, record in enumerate(run.trainers) if record.final]
    awaited = [] if run.unsaved else well
    wanted = undisturbed.values()
    for server, end in run.last_ends():
        for leaf, values in end.values.items():
            where = f"server {server} at its end"
            if leaf in HITS:
                counts = times_applied(mode, values)
                yield from _lost(counts, [] if end.error else awaited, f"{where}: '{leaf}'")
            is_whole = mode.is_exact and len(well) == TRAINERS and end.error is None
            if is_whole and values.tobytes() != wanted[leaf].tobytes():
                yield f"{where} has another '{leaf}' than undisturbed"
        for key, row in end.rows.items():
            where = f"server {server} at its end: row {key}"
            counts = times_applied(mode, row, is_row=True)
            yield from _lost(counts, [] if end.error else awaited, where)
    for trainer in well if mode.is_exact else ():
        final, other = run.trainers[trainer], undisturbed.trainers[trainer]
        for leaf, values in final.final.items():
            if values.tobytes() != other.final[leaf].tobytes():
                yield f"trainer {trainer} ends with another '{leaf}' than undisturbed"
        if final.rows is not None and final.rows.tobytes() != _bytes(other.rows):
            yield f"trainer {trainer} ends with other rows than undisturbed"


def _bytes(array: np.ndarray | None) -> bytes:
    return b"" if array is None else array.tobytes()


def _lost(counts: np.ndarray, well: list[int], where: str) -> Iterator[str]:
    """Yields pushes that were applied more than once, or not at all though awaited."""
    for step, trainer in np.argwhere((counts != 0) & (counts != 1)):
        times = _times(counts[step, trainer])
        yield f"{where} has trainer {trainer}'s push of step {step + 1} {times}"
    for step, trainer in np.argwhere(counts == 0):
        if trainer in well:
            yield f"{where} lacks trainer {trainer}'s push of step {step + 1}"
