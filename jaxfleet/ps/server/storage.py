"""Writes what a server holds into a job's checkpoints, and reads it from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from jaxfleet.analysis.slices import held_parts, rows_of_slices
from jaxfleet.checkpoint import Checkpoint, PartReceipt, Piece, open_checkpoint, write_part
from jaxfleet.checkpoint.tables import load_tables, table_pieces
from jaxfleet.errors import CheckpointError
from jaxfleet.ir import Kind
from jaxfleet.ps.server.plan import ServerPlan
from jaxfleet.tables import TableStore, make_store

_BLOCK = ".block"


@dataclass(frozen=True)
class Cut:
    """Where a slice lies in its leaf.

    Attributes:
        leaf: the leaf's name.
        start: the slice's first row; -1 for a copy of all of it.
        rows: how many rows the leaf has.
    """

    leaf: str
    start: int
    rows: int


def find_cuts(plan: ServerPlan) -> dict[str, Cut]:
    """Returns where each slice lies that the server holds; what is whole is left out."""
    rows, held = rows_of_slices(plan.program), held_parts(plan.program)
    cuts = {}
    for name in plan.state:
        leaf, number = _split(name)
        # Of a leaf that is whole there is no slice: then `w.block0` is the user's own name.
        if number is not None and number < len(rows.get(leaf, ())) > 1:
            cuts[name] = Cut(leaf, sum(rows[leaf][:number]), sum(rows[leaf]))
    for block in plan.blocks:
        touched = dict.fromkeys((*block.lowered.writes, *block.lowered.reads))
        totals = [cuts[name] for name in touched if name in cuts]
        for name in touched:
            if name not in plan.state or name in cuts or not totals:
                continue
            leaf, start = held.get(name, (_split(name)[0], totals[0].start))
            if _split(name)[1] is not None:
                cuts[name] = Cut(leaf, start, totals[0].rows)
    return cuts


def save_part(
    folder: Path,
    plan: ServerPlan,
    arrays: Mapping[str, np.ndarray],
    step: int,
    stores: Sequence[TableStore] = (),
) -> PartReceipt:
    """Writes this server's part of a checkpoint, the rows of its tables with it.

    Raises:
        CheckpointError: it cannot be written.
    """
    cuts = find_cuts(plan)
    owned = _owned(plan)

    def piece(name: str, array: np.ndarray) -> Piece:
        cut = cuts.get(name)
        if cut is None:
            return Piece.whole(name, array, shared=name not in owned)
        if cut.start < 0:
            return Piece.whole(cut.leaf, array, shared=True)
        return Piece(cut.leaf, array, cut.start, (cut.rows, *array.shape[1:]))

    # Of copies that this server has several of, one is enough.
    copies: dict[str, str] = {c.leaf: name for name, c in cuts.items() if c.start < 0}
    kept = [n for n in arrays if n not in cuts or cuts[n].start >= 0 or copies[cuts[n].leaf] == n]
    dense = (piece(name, arrays[name]) for name in kept)
    pieces = chain(dense, table_pieces(stores, buckets=plan.buckets))
    return write_part(folder, f"server {plan.server}", pieces, step=step)


def save_tables_part(
    folder: Path, plan: ServerPlan, step: int, stores: Sequence[TableStore]
) -> PartReceipt:
    """Writes this server's part of a checkpoint of tables alone.

    Raises:
        CheckpointError: it cannot be written.
    """
    pieces = table_pieces(stores, buckets=plan.buckets)
    return write_part(folder, f"server {plan.server}", pieces, step=step)


def load_state(folder: Path, plan: ServerPlan) -> tuple[dict[str, np.ndarray], int]:
    """Reads what this server holds from a checkpoint, however it was cut.

    Returns:
        The arrays, and the checkpoint's step.

    Raises:
        CheckpointError: there is none, it is damaged, or has not what the server needs.
    """
    checkpoint, cuts = open_checkpoint(folder), find_cuts(plan)
    arrays = {}
    for name in plan.state:
        wanted = plan.types[name]
        cut = cuts.get(name, Cut(name, -1, 0))
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
    """Returns a store without rows for each table."""
    return [make_store(spec, share=plan.share) for spec in plan.tables]


def load_stores(found: Sequence[Checkpoint], plan: ServerPlan) -> list[TableStore]:
    """Returns the rows that this server has, from a checkpoint, however many servers saved it.

    Args:
        found: the checkpoint, and those that it holds changes of.
        plan: the server's program.

    Raises:
        CheckpointError: it has not what the server needs, or is damaged.
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
    """Returns the variables that no other server holds: those updated along with a parameter."""
    found: set[str] = set()
    for block in plan.blocks:
        made = [name for name in block.lowered.writes if name in plan.state]
        if any(plan.state[name].kind is Kind.PARAM for name in made):
            found.update(made)
    return found
