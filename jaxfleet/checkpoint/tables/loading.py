"""Fills stores with saved tables."""

from collections.abc import Iterable, Mapping, Sequence

from jaxfleet.checkpoint.reading import Checkpoint
from jaxfleet.checkpoint.tables.pieces import ALL_BUCKETS
from jaxfleet.checkpoint.tables.saved import SavedTable, saved_tables
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowKeeper, TableSpec


def load_tables(
    chain: Sequence[Checkpoint], stores: Iterable[RowKeeper], *, buckets: range = ALL_BUCKETS
) -> None:
    """Fills empty stores, each with its table's rows of some buckets, to the bit as they were.

    How many processes saved does not matter: one that has `buckets` now reads those alone.

    Args:
        chain: the checkpoint, and those that it holds changes of: `CheckpointSeries.chain`, or
            `[open_checkpoint(folder)]` of one that holds all.
        stores: by the names of their specs.
        buckets: those that this process has.

    Raises:
        CheckpointError: a table is not there, is of another dimension or optimizer, or is damaged.
            The stores are then not to be used.
    """
    saved = saved_tables(chain)
    for store in stores:
        table = _named(saved, store.spec, chain)
        for batch in table.batches(buckets):
            store.put(batch)


def _named(
    saved: Mapping[str, SavedTable], spec: TableSpec, chain: Sequence[Checkpoint]
) -> SavedTable:
    if (table := saved.get(spec.name)) is None:
        what = f"the checkpoint in {chain[0].folder} has no table `{spec.name}`"
        raise CheckpointError(what, hint=f"it has {', '.join(saved) or 'none'}")
    was = table.spec
    for what, before, now in (
        ("rows of", was.dim, spec.dim),
        ("the optimizer", was.optimizer.kind, spec.optimizer.kind),
    ):
        if before != now:
            message = f"table `{spec.name}` was saved with {what} {before}, and has {now} now"
            hint = "give the table what it had, or export its rows and begin with those"
            raise CheckpointError(message, hint=hint)
    return table
