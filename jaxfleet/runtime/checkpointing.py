"""Checkpoints of a state by leaf names, the same in every mode."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.checkpoint import (
    Checkpoint,
    Piece,
    open_checkpoint,
    position_facts,
    save_arrays,
    save_pieces,
)
from jaxfleet.checkpoint.tables import load_tables, table_pieces
from jaxfleet.errors import CheckpointError
from jaxfleet.ir import Variable
from jaxfleet.lower import host_type, to_device, to_host
from jaxfleet.tables.access import LocalTables

_STEPS = "table steps"  # number of steps that the tables of one process have seen


def save_leaves(
    path: str | Path,
    captured: Captured,
    leaves: Sequence[Any],
    *,
    step: int,
    tables: LocalTables | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    data: Mapping[str, int] | None = None,
) -> None:
    """Writes a checkpoint of a whole state, from one process.

    The state is `leaves` and the values in `extra`, after `step` steps; `tables` and the position
    `data` of a loader are saved with it.

    Raises:
        CheckpointError: it cannot be written; the previous checkpoint stays.
    """
    names = [leaf.name for leaf in captured.signature.state]
    arrays = {name: on_host(value) for name, value in zip(names, leaves, strict=True)}
    arrays.update(extra or {})
    if tables is None or not tables.stores:
        save_arrays(Path(path).absolute(), arrays, step=step, facts=position_facts(data))
        return
    facts = {_STEPS: tables.step, **position_facts(data)}
    pieces = (
        *(Piece.whole(name, array) for name, array in arrays.items()),
        *table_pieces(tables.stores.values()),
    )
    save_pieces(Path(path).absolute(), pieces, step=step, facts=facts)


def read_tables(checkpoint: Checkpoint, tables: LocalTables) -> None:
    """Replaces the contents of tables by a checkpoint's, if that is complete and matches."""
    fresh = LocalTables(store.spec for store in tables.stores.values())
    load_tables([checkpoint], fresh.stores.values())
    fresh.step = max(checkpoint.step, int(str(checkpoint.facts.get(_STEPS, 0))))
    tables.become(fresh)


def open_for(path: str | Path, captured: Captured) -> Checkpoint:
    """Opens a checkpoint that has every leaf of a step's state, in the same shape."""
    checkpoint = open_checkpoint(Path(path).absolute())
    known = set(checkpoint.names())
    for leaf in captured.signature.state:
        variable = captured.program.variables[leaf.name]
        if leaf.name not in known:
            what = f"the checkpoint at {path} has no '{leaf.name}'"
            raise CheckpointError(what, hint="it is of a step with another state")
        held = host_type(variable)
        shape, dtype = checkpoint.shape(leaf.name), np.dtype(checkpoint.dtype(leaf.name))
        if (shape, dtype) != (held.shape, held.dtype):
            what = f"'{leaf.name}' is {dtype}{list(shape)} in the checkpoint at {path}"
            raise CheckpointError(f"{what}, and {held.dtype}{list(held.shape)} in the step")
    return checkpoint


def read_leaves(checkpoint: Checkpoint, variables: Sequence[Variable]) -> dict[str, Any]:
    """Returns leaves on the device, by name."""
    return {v.name: to_device(checkpoint.read(v.name), v.dtype)[0] for v in variables}


def on_host(value: Any) -> np.ndarray:
    """Returns a leaf's value on the host; for a random key, its data."""
    return np.asarray(to_host(jax.numpy.asarray(value))[0], order="C")
