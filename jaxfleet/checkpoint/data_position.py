"""The position of a data loader among the facts of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from jaxfleet.checkpoint.manifest import Plain
from jaxfleet.checkpoint.reading import Checkpoint, open_checkpoint
from jaxfleet.errors import CheckpointError

_FACT = "data position"


def position_facts(data: Mapping[str, Plain] | None) -> dict[str, Plain]:
    """Returns the facts to commit with a position, or without one.

    Examples:
        >>> position_facts({"step": 3})
        {'data position': {'step': 3}}
    """
    return {} if data is None else {_FACT: dict(data)}


def position_in(checkpoint: Checkpoint) -> dict[str, object] | None:
    """Returns the position that was saved with an open checkpoint, if any."""
    found = checkpoint.facts.get(_FACT)
    return dict(found) if isinstance(found, dict) else None


def read_position(path: str | Path) -> dict[str, object]:
    """Returns the position that was saved with a checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it was saved without a position.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from jaxfleet.checkpoint import save_arrays
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "checkpoint")
        ...     save_arrays(path, {"w": [1.0]}, step=3, facts=position_facts({"step": 3}))
        ...     read_position(path)
        {'step': 3}
    """
    checkpoint = open_checkpoint(Path(path).absolute())
    found = position_in(checkpoint)
    if found is None:
        what = f"the checkpoint of step {checkpoint.step} at {path} has no position of a loader"
        hint = "save with step.save(path, state, data=batches.state()); or, if each step read one "
        hint += "batch, go on with loader.from_step(step)"
        raise CheckpointError(what, hint=hint)
    return found
