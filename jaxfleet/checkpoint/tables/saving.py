"""Saves the tables that one process holds: all of them, or what changed since an older save."""

from collections.abc import Mapping, Sequence

from jaxfleet.checkpoint.committing import commit, discard
from jaxfleet.checkpoint.layout import MANIFEST
from jaxfleet.checkpoint.links import Link
from jaxfleet.checkpoint.pieces import PartReceipt, Plain
from jaxfleet.checkpoint.reading import Checkpoint, open_checkpoint
from jaxfleet.checkpoint.series import CheckpointSeries
from jaxfleet.checkpoint.tables.layer import layers_in
from jaxfleet.checkpoint.tables.pieces import ALL_BUCKETS, table_pieces
from jaxfleet.checkpoint.writing import write_part
from jaxfleet.errors import CheckpointError
from jaxfleet.tables import RowKeeper


def save_tables(
    series: CheckpointSeries,
    stores: Sequence[RowKeeper],
    *,
    step: int,
    after: int | None = None,
    buckets: range = ALL_BUCKETS,
    facts: Mapping[str, Plain] | None = None,
) -> PartReceipt:
    """Saves tables as the checkpoint of a step, in one step: it is there whole, or not at all.

    Args:
        series: where it goes.
        stores: one for each table; they must not change meanwhile.
        step: the last step that is in them.
        after: the step of an older save of the same stores in this series; then only what changed
            since is written, and that one is kept as long as this one is. None writes everything.
        buckets: those that the stores have.
        facts: plain data, for whoever reads it.

    Raises:
        CheckpointError: the disk is full or fails, or what was to be followed is not there.
            Checkpoints that are there are as they were.
    """
    older = None if after is None else followed(series, after, step)
    since = {} if older is None else dict.fromkeys(layers_in(older), older.step)
    folder = series.path(step)
    pieces = table_pieces(stores, buckets=buckets, since=since)
    receipt = write_part(folder, "tables", pieces, step=step)
    try:
        link = None if older is None else Link(older.step, older.sha256)
        commit(folder, [receipt], step=step, facts=facts, after=link)
    except CheckpointError:
        discard(folder, [receipt])
        raise
    return receipt


def followed(series: CheckpointSeries, after: int, step: int) -> Checkpoint:
    """Returns the checkpoint that one of changes is to follow.

    Raises:
        CheckpointError: it is not there or damaged, or not older.
    """
    if after >= step:
        what = f"the changes until step {step} cannot be of the save of step {after}"
        raise CheckpointError(what, hint="a save of changes needs an older one to follow")
    if not (series.path(after) / MANIFEST).is_file():
        what = f"{series.path(after)} is gone, so the changes since step {after} say nothing"
        raise CheckpointError(what, hint="save everything: after=None")
    return open_checkpoint(series.path(after))
