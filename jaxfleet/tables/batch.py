"""What a table holds of one bucket, as plain arrays: so rows are saved, moved and put on disk."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxfleet.tables.spec import TableSpec


def _no_keys() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """What a table holds of one bucket, or what changed of it.

    A key is in one of `keys`, `candidates` and `gone`, so what a batch says of a key replaces all
    that was known of it. Each of the three is ascending; the arrays are copies, or not written
    again.

    Attributes:
        bucket: that all its keys are in.
        keys: int64[n], those with a row.
        rows: float32[n, dim].
        state: the optimizer's, by its name: [n] or [n, dim], of any dtype.
        counters: by their name, [n] each, of any dtype: `last` (the step of the last touch),
            `touches`, `shows`, `clicks`.
        candidates: int64[m], keys that admission lets wait.
        candidate_counters: [m] each: `last` and `touches`.
        gone: int64[k], keys that had a row or waited, and do no more; none unless changes since
            a step were asked for.
    """

    bucket: int
    keys: np.ndarray
    rows: np.ndarray
    state: Mapping[str, np.ndarray] = field(default_factory=dict)
    counters: Mapping[str, np.ndarray] = field(default_factory=dict)
    candidates: np.ndarray = field(default_factory=_no_keys)
    candidate_counters: Mapping[str, np.ndarray] = field(default_factory=dict)
    gone: np.ndarray = field(default_factory=_no_keys)

    def __len__(self) -> int:
        return len(self.keys)


class RowKeeper(Protocol):
    """What saving and moving ask of a store of rows.

    Steps that a store is given never go down: where pushes are applied at once they are the
    server's own count, not the trainers'. So what was touched after a save has a later step.
    """

    @property
    def spec(self) -> TableSpec:
        """What the table is."""
        ...

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        """Yields what is held, one bucket after the other, ascending; empty ones are left out.

        Args:
            touched_since: only rows and candidates touched after this step, and the keys that
                went after it; everything, and none that went, where it is None.
        """
        ...

    def put(self, batch: RowBatch) -> None:
        """Takes a batch in: its keys are then as it says, those in `gone` are no more."""
        ...

    def forget_gone(self, until: int) -> None:
        """Forgets keys that went at this step or before: nobody will ask for changes since then."""
        ...
