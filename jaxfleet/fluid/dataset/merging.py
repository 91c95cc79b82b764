"""Makes one sample of several that have one id, as `set_merge_by_lineid` asks for."""

import warnings
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from jaxfleet.fluid.dataset.slots import Samples

_ZERO = 1e-6  # a smaller number of a slot is none, as in fluid


def merge_by_id(samples: Samples, merge_size: int) -> Samples:
    """Returns one sample for each id, in the order of the ids.

    A slot of sequences is that of the one sample that has values in it; an id of whose samples two
    have some is left out. Of a dense slot the last values that are not all 0 stay.

    Args:
        samples: with their ids.
        merge_size: how many samples an id has; ids with more or fewer are left out. 0: any number.
    """
    assert samples.ids is not None
    order = np.argsort(samples.ids.astype(str), kind="stable").tolist()
    has_values, rows, lost = _has_values(samples), list[list[int]](), 0
    for _, group in groupby(order, key=samples.ids.__getitem__):
        members = list(group)
        chosen = None
        if merge_size in {0, len(members)}:
            chosen = _chosen(samples, members, has_values)
        if chosen is None:
            lost += len(members)
        else:
            rows.append(chosen)
    if lost:
        what = f"{lost} samples are left out: their ids have not {merge_size} samples each"
        warnings.warn(f"{what}, or two of them have values in one slot", stacklevel=4)
    return samples.of_rows(np.array(rows, np.int64).reshape(-1, len(samples.slots)))


def _chosen(samples: Samples, members: Sequence[int], has_values: np.ndarray) -> list[int] | None:
    """Returns for each slot which of the samples it is taken of; None where two have values."""
    chosen = []
    for at, slot in enumerate(samples.slots):
        having = [member for member in members if has_values[member, at]] or [members[0]]
        if slot.is_sequence and len(having) > 1:
            return None
        chosen.append(having[-1])
    return chosen


def _has_values(samples: Samples) -> np.ndarray:
    """Returns bool[samples, slots]: whether any value is not 0."""
    columns = []
    for at, values in enumerate(samples.values):
        counted = np.concatenate([[0], np.cumsum(np.abs(values) >= _ZERO)])
        ends = np.cumsum(samples.counts[:, at], dtype=np.int64)
        columns.append(counted[ends] > counted[ends - samples.counts[:, at]])
    return np.stack(columns, axis=1)
