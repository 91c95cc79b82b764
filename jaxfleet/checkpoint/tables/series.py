"""Saves of one process's tables, one after the other: now and then all, else what changed."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.checkpoint.pieces import PartReceipt
from jaxfleet.checkpoint.series import CheckpointSeries
from jaxfleet.checkpoint.tables.compacting import compact
from jaxfleet.checkpoint.tables.loading import load_tables
from jaxfleet.checkpoint.tables.pieces import ALL_BUCKETS
from jaxfleet.checkpoint.tables.saving import save_tables
from jaxfleet.tables import RowKeeper


@dataclass
class TableSeries:
    """Saves and restores stores, and knows what their changes are changes of.

    Attributes:
        series: where the checkpoints are.
        stores: one for each table.
        buckets: those that the stores have.
        changes: how many saves of changes may follow one of everything; what is read at a restore
            grows with it, and what a save writes shrinks.
    """

    series: CheckpointSeries
    stores: Sequence[RowKeeper]
    buckets: range = ALL_BUCKETS
    changes: int = 9
    _last: int | None = None  # the last save that these stores had everything of
    _length: int = 0  # how many saves of changes it stands on

    def save(self, step: int) -> PartReceipt:
        """Writes the checkpoint of a step, and removes those that nobody needs.

        The step that was saved last, saved again, is written whole.

        Raises:
            CheckpointError: the disk is full or fails. Older checkpoints are as they were.
        """
        whole = self._last is None or self._last >= step or self._length >= self.changes
        after = None if whole else self._last
        saved = save_tables(self.series, self.stores, step=step, after=after, buckets=self.buckets)
        self._last, self._length = step, 0 if whole else self._length + 1
        self.series.prune()
        for store in self.stores:
            store.forget_gone(step)
        return saved

    def restore(self, step: int | None = None) -> int | None:
        """Fills the stores, which must be empty, from the checkpoint of a step, or the last good.

        Returns:
            The step; None where there is no checkpoint.

        Raises:
            CheckpointError: it is damaged, or has other tables.
        """
        found = self.series.latest() if step is None else step
        if found is None:
            return None
        chain = self.series.chain(found)
        load_tables(chain, self.stores, buckets=self.buckets)
        self._last, self._length = found, len(chain) - 1
        return found

    def compact(self) -> None:
        """Writes the last checkpoint anew as one that stands alone; its stores are not asked.

        Raises:
            CheckpointError: it is damaged, or the disk is full. It is as it was.
        """
        if self._last is not None and self._length:
            compact(self.series, self._last)
            self._length = 0
            self.series.prune()
