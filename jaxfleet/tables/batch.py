"""Rows with all that belongs to them, as plain arrays: what is saved, moved and put back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


def _no_keys() -> np.ndarray:
    return np.empty(0, np.int64)


def _no_counts() -> np.ndarray:
    return np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Some of a table's rows; those of one bucket are together, and in the order of their keys.

    Attributes:
        keys: int64[n].
        rows: float32[n, dim].
        state: the optimizer's, by name; float32[n, dim], or int32[n] for a row's own steps.
        counters: `touched` (int64[n], the last step that made or updated the row) always;
            `touches` (int64[n]) where a capacity by use is given; `shows` and `clicks`
            (float32[n]) where scores are.
        candidates: int64[m], keys that are not admitted yet.
        counts: int32[m], how often each of them was pushed.
        counted: int64[m], the last step that pushed each.
        gone: int64[k], keys that left since; in what `batches(touched_since=...)` gives alone.
            `put` takes them out before it puts anything in.
    """

    keys: np.ndarray
    rows: np.ndarray
    state: Mapping[str, np.ndarray] = field(default_factory=dict)
    counters: Mapping[str, np.ndarray] = field(default_factory=dict)
    candidates: np.ndarray = field(default_factory=_no_keys)
    counts: np.ndarray = field(default_factory=_no_counts)
    counted: np.ndarray = field(default_factory=_no_keys)
    gone: np.ndarray = field(default_factory=_no_keys)
