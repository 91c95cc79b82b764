"""A server's part of a job's checkpoints, which can be read back with any other slicing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from jaxfleet.analysis.placement.sliced_layout import rows_of_slices, server_variables
from jaxfleet.checkpoint import Checkpoint, PartReceipt, Piece, open_checkpoint, write_part
from jaxfleet.checkpoint.tables import load_tables, table_pieces
from jaxfleet.errors import CheckpointError
from jaxfleet.ir import Kind
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.tables import TableStore, make_store

_BLOCK = ".block"


@dataclass(frozen=True)
class SliceRange:
    """Range of a slice in its leaf.

    Attributes:
        start: first row of the slice; -1 for a full copy.
    """

    leaf: str
    start: int
    rows: int


def find_slice_ranges(plan: ServerPlan) -> dict[str, SliceRange]:
    """Returns the ranges of the server's slices; whole leaves are omitted."""
    rows, held = rows_of_slices(plan.program), server_variables(plan.program)
    cuts = {}
    for name in plan.state:
        leaf, number = _split(name)
        # A whole leaf has no slices: then `w.block0` is the user's own name.
        if number is not None and number < len(rows.get(leaf, ())) > 1:
            cuts[name] = SliceRange(leaf, sum(rows[leaf][:number]), sum(rows[leaf]))
    for block in plan.blocks:
        touched = dict.fromkeys((*block.lowered.writes, *block.lowered.reads))
        totals = [cuts[name] for name in touched if name in cuts]
        for name in touched:
            if name not in plan.state or name in cuts or not totals:
                continue
            leaf, start = held.get(name, (_split(name)[0], totals[0].start))
            if _split(name)[1] is not None:
                cuts[name] = SliceRange(leaf, start, totals[0].rows)
    return cuts


def save_part(
    folder: Path,
    plan: ServerPlan,
    arrays: Mapping[str, np.ndarray],
    step: int,
    stores: Sequence[TableStore] = (),
) -> PartReceipt:
    """Writes this server's part of a checkpoint, including the rows of its tables."""
    cuts = find_slice_ranges(plan)
    owned = _owned(plan)

    def piece(name: str, array: np.ndarray) -> Piece:
        cut = cuts.get(name)
        if cut is None:
            return Piece.whole(name, array, shared=name not in owned)
        if cut.start < 0:
            return Piece.whole(cut.leaf, array, shared=True)
        return Piece(cut.leaf, array, cut.start, (cut.rows, *array.shape[1:]))

    # Of several copies on this server, one is enough.
    copies: dict[str, str] = {c.leaf: name for name, c in cuts.items() if c.start < 0}
    kept = [n for n in arrays if n not in cuts or cuts[n].start >= 0 or copies[cuts[n].leaf] == n]
    dense = (piece(name, arrays[name]) for name in kept)
    pieces = chain(dense, table_pieces(stores, buckets=plan.buckets))
    return write_part(folder, f"server {plan.server}", pieces, step=step)


def save_tables_part(
    folder: Path, plan: ServerPlan, step: int, stores: Sequence[TableStore]
) -> PartReceipt:
    """Writes this server's part of a checkpoint of tables only."""
    pieces = table_pieces(stores, buckets=plan.buckets)
    return write_part(folder, f"server {plan.server}", pieces, step=step)


def load_state(folder: Path, plan: ServerPlan) -> tuple[dict[str, np.ndarray], int]:
    """Reads this server's state from a checkpoint, with any slicing.

    Returns:
        The arrays, and the checkpoint's step.

    Raises:
        CheckpointError: it is missing, damaged, or lacks a variable.
    """
    checkpoint, cuts = open_checkpoint(folder), find_slice_ranges(plan)
    arrays = {}
    for name in plan.state:
        wanted = plan.types[name]
        cut = cuts.get(name, SliceRange(name, -1, 0))
        if cut.start >= 0:
            array = checkpoint.read(cut.leaf, cut.start, cut.start + wanted.shape[0])
        else:
            array = checkpoint.read(cut.leaf)
        if array.dtype != wanted.dtype or array.shape != wanted.shape:
            what = f"'{name}' is {array.dtype}{list(array.shape)} in {folder}"
            raise CheckpointError(f"{what}, not {wanted.dtype}{list(wanted.shape)}")
        arrays[name] = array
    return arrays, checkpoint.step


def open_stores(plan: ServerPlan) -> list[TableStore]:
    """Returns an empty store for each table."""
    return [make_store(spec, share=plan.share) for spec in plan.tables]


def load_stores(found: Sequence[Checkpoint], plan: ServerPlan) -> list[TableStore]:
    """Loads this server's rows from a checkpoint, followed by those that it is incremental to.

    Any number of servers may have written them.
    """
    stores = open_stores(plan)
    if stores:
        load_tables(found, stores, buckets=plan.buckets)
    return stores


def _split(name: str) -> tuple[str, int | None]:
    """Returns a slice's leaf and its number: `w` and 1 for `w.block1`."""
    leaf, found, number = name.rpartition(_BLOCK)
    return (leaf, int(number)) if found and number.isdigit() else (name, None)


def _owned(plan: ServerPlan) -> set[str]:
    """Returns the variables that only this server has: those updated along with a parameter."""
    found: set[str] = set()
    for block in plan.blocks:
        made = [name for name in block.lowered.writes if name in plan.state]
        if any(plan.state[name].kind is Kind.PARAM for name in made):
            found.update(made)
    return found
