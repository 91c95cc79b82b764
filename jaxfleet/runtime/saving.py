"""Checkpoints of a state by the names of its leaves; every mode writes and reads the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.checkpoint import Checkpoint, open_checkpoint, save_arrays
from jaxfleet.errors import CheckpointError
from jaxfleet.ir import Variable
from jaxfleet.lower import host_type, to_device, to_host


def save_leaves(path: str | Path, captured: Captured, leaves: Sequence[Any], *, step: int) -> None:
    """Writes a checkpoint of a whole state, from one process.

    Raises:
        CheckpointError: it cannot be written; what was there before stays.
    """
    names = [leaf.name for leaf in captured.signature.state]
    arrays = {name: on_host(value) for name, value in zip(names, leaves, strict=True)}
    save_arrays(Path(path).absolute(), arrays, step=step)


def open_for(path: str | Path, captured: Captured) -> Checkpoint:
    """Opens a checkpoint that holds a state of a step.

    Raises:
        CheckpointError: there is none, or it lacks a leaf or has it in another shape.
    """
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
    """Returns a leaf's value on the host; of a random key, what it is made of."""
    return np.asarray(to_host(jax.numpy.asarray(value))[0], order="C")
