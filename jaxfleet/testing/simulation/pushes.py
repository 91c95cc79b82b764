"""Reads from a value which pushes it contains, and how often.

What a push adds at its place depends on the mode. A mean over trainers or over merged steps adds
that share. In `geo` an exchange adds the sender's change divided by the number of trainers, and the
rest follows in later exchanges: with two trainers, after m exchanges a value has `1 - 2**-m` of a
push. All these are exact in float32.
"""

import numpy as np

from jaxfleet.testing.simulation.workload import PLACES, STEPS, TRAINERS, Mode

_MOST_EXCHANGES = 2 * STEPS


def times_applied(
    mode: Mode, values: np.ndarray, *, holder: int | None = None, is_row: bool = False
) -> np.ndarray:
    """Returns how often each push was applied, with an axis for steps and one for trainers.

    It is NaN for what no number of whole pushes adds.

    Args:
        mode: how the values came about.
        values: of a leaf or a row.
        holder: the trainer whose local values they are; None for those of a server.
        is_row: of a table, whose gradients are summed over the trainers, not averaged.
    """
    added: np.ndarray = -values.reshape(STEPS, TRAINERS).astype(np.float64)
    if mode.communication == "sync":
        return added if is_row else added * TRAINERS
    if mode.communication == "half_async":
        whole: np.ndarray = added * _merged(mode.period)[:, None]
        return whole
    if mode.communication not in {"geo", "fl"}:
        return added
    columns = []
    for trainer, column in enumerate(added.T):
        if trainer == holder and mode.communication == "geo":
            columns.append(_whole(column))
        elif mode.communication == "geo":
            columns.append(_exchanged(column, mode.period))
        else:
            columns.append(_averaged(column, is_local=trainer == holder))
    return np.stack(columns, axis=1)


def times_of_samples(mode: Mode, values: np.ndarray) -> np.ndarray:
    """Returns how often each leased sample was applied; NaN for what no number of times adds.

    In `half_async` a mean of merged steps does not show more than whether it was, nor in `geo` the
    parts of a change where the number of trainers changes.
    """
    added = -values.astype(np.float64)
    if mode.communication == "half_async" or (mode.communication == "geo" and mode.changes):
        return np.where((added > 0.0) & (added <= 1.0), 1.0, added)
    if mode.communication == "geo":
        parts = 1.0 - 0.5 ** np.arange(1, 4 * PLACES)
        more = np.where((added > 1.0) & (added <= 2.0), 2.0, np.nan)  # the sum of two such parts
        found = np.where(added == 0.0, 0.0, more)
        return np.where(np.isin(added, (*parts, 1.0)), 1.0, found)
    return added


def _merged(period: int) -> np.ndarray:
    """Returns with how many others the gradient of each step is averaged, itself included."""
    starts = np.arange(STEPS) // period * period
    return np.asarray(np.minimum(starts + period, STEPS) - starts)


def _whole(column: np.ndarray) -> np.ndarray:
    return np.where(np.isin(column, (0.0, 1.0)), column, np.nan)


def _averaged(column: np.ndarray, *, is_local: bool) -> np.ndarray:
    """A mean has a share of what one trainer adds, and its own value all of it."""
    if is_local:
        column = np.where(column == 1.0, 1.0 / TRAINERS, column)
    return _whole(column * TRAINERS)


def _exchanged(column: np.ndarray, period: int) -> np.ndarray:
    """Some number of exchanges explains all values of a trainer, or none does."""
    first = np.arange(STEPS) // period  # number of the exchange that has each step first
    for exchanges in range(_MOST_EXCHANGES):
        later = np.maximum(exchanges - first, 0)
        if np.array_equal(column, 1.0 - 0.5**later):
            return np.minimum(later, 1).astype(float)
    return np.where(column == 0.0, 0.0, np.nan)
