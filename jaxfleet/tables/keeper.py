"""What saving and moving rows ask of whatever keeps them, in memory or on disk."""

from collections.abc import Iterator
from typing import Protocol

from jaxfleet.tables.batch import RowBatch
from jaxfleet.tables.spec import TableSpec


class RowKeeper(Protocol):
    """Gives its rows out as batches, and takes batches in.

    Steps that it is given never go down: where pushes are applied at once they are the server's
    own count, not the trainers'. So what is touched after a save has a later step than the save.
    """

    @property
    def spec(self) -> TableSpec:
        """What the table is."""
        ...

    def batches(self, touched_since: int | None = None) -> Iterator[RowBatch]:
        """Yields what is held, by ascending bucket and, in a bucket, by ascending key.

        A bucket is in one batch; a batch may have several.

        Args:
            touched_since: only rows and candidates touched after this step, and the keys that
                went after it; everything, and none that went, where it is None.
        """
        ...

    def put(self, batch: RowBatch) -> None:
        """Takes a batch in: its keys are then as it says, and those in `gone` are no more."""
        ...

    def forget_gone(self, until: int) -> None:
        """Forgets keys that went at this step or before: nobody will ask for changes since then."""
        ...
