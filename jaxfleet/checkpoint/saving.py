"""Saves arrays that one process holds whole."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jaxfleet.checkpoint.committing import commit, discard
from jaxfleet.checkpoint.pieces import Piece, Plain
from jaxfleet.checkpoint.writing import write_part
from jaxfleet.errors import CheckpointError


def save_arrays(
    folder: Path,
    arrays: Mapping[str, ArrayLike],
    *,
    step: int,
    facts: Mapping[str, Plain] | None = None,
) -> None:
    """Saves whole arrays as a checkpoint of one part.

    Args:
        folder: the checkpoint's; one that is there is replaced, in one step.
        arrays: what numpy takes for arrays, by name.
        step: the step that they belong to.
        facts: plain data, for whoever reads it.

    Raises:
        CheckpointError: the disk is full or fails, or a value cannot be saved.
    """
    pieces = (Piece.whole(name, np.asarray(array)) for name, array in arrays.items())
    save_pieces(folder, pieces, step=step, facts=facts)


def save_pieces(
    folder: Path, pieces: Iterable[Piece], *, step: int, facts: Mapping[str, Plain] | None = None
) -> None:
    """Saves pieces as a checkpoint of one part, otherwise as `save_arrays`.

    Args:
        folder: the checkpoint's.
        pieces: all that it holds.
        step: the step that they belong to.
        facts: plain data, for whoever reads it.

    Raises:
        CheckpointError: the disk is full or fails, or a value cannot be saved.
    """
    receipt = write_part(folder, "all", pieces, step=step)
    try:
        commit(folder, [receipt], step=step, facts=facts)
    except CheckpointError:
        discard(folder, [receipt])
        raise
