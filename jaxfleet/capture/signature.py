"""What goes into a step: the leaves of its state and of its batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxfleet.capture.trees import Leaf, leaves_of
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Source
from jaxfleet.ops.frames import line_of_caller


@dataclass(frozen=True)
class Signature:
    """Says how a step's pytrees map to variables.

    Attributes:
        state: leaves of the state, in order.
        batch: leaves of the batch, in order.
        state_tree: the state's structure.
        batch_tree: the batch's structure.
        rows: the example's global batch size.
    """

    state: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]
    state_tree: Any
    batch_tree: Any
    rows: int

    @classmethod
    def of(cls, state: Any, batch: Any) -> "Signature":
        """Reads the signature off an example.

        Raises:
            CaptureError: a leaf is not an array; the batch's leading axes differ, or there is none.
        """
        caller = line_of_caller()
        state_leaves = tuple(leaves_of(state, "state", bare=True, source=caller))
        batch_leaves = tuple(leaves_of(batch, "batch", source=caller))
        structure = jax.tree_util.tree_structure
        rows = _rows(batch_leaves, caller)
        return cls(state_leaves, batch_leaves, structure(state), structure(batch), rows)

    def with_rows(self, rows: int) -> "Signature":
        """Returns the same signature for another batch size."""
        batch = tuple(
            replace(leaf, shape=(rows, *leaf.shape[1:])) if leaf.shape else leaf
            for leaf in self.batch
        )
        return replace(self, batch=batch, rows=rows)


def _is_raw_key(leaf: Leaf) -> bool:
    return leaf.shape in {(2,), (4,)} and leaf.dtype == "uint32"


def _rows(batch: Sequence[Leaf], caller: Source | None) -> int:
    sizes = {leaf.shape[0]: leaf.name for leaf in batch if leaf.shape}
    if len(sizes) > 1:
        listed = ", ".join(f"'{name}' has {rows}" for rows, name in sorted(sizes.items()))
        what = f"the batch's leaves differ in their leading axis: {listed}"
        hint = (
            "axis 0 of every batch leaf is the batch; scalars and the state are not cut. Where "
            "examples differ in size, or are joined in one list, pad what belongs to one example "
            "to one size, and stack the examples"
        )
        if (key := next((leaf.name for leaf in batch if _is_raw_key(leaf)), None)) is not None:
            hint = f"'{key}' looks like a random key made by jax.random.PRNGKey: a typed one, "
            hint += "jax.random.key(0), is a scalar, which every device gets whole"
        raise CaptureError(what, source=caller, hint=hint)
    if not sizes:
        found = ", ".join(f"'{leaf.name}'" for leaf in batch) or "nothing"
        what = f"the batch has no leaf with rows: it holds {found}"
        hint = "axis 0 of a batch leaf is the batch; scalars come beside it"
        raise CaptureError(what, source=caller, hint=hint)
    rows = next(iter(sizes))
    if rows == 0:
        what = f"the batch has no rows: '{batch[0].name}' has shape {list(batch[0].shape)}"
        raise CaptureError(what, source=caller, hint="give an example of at least one row")
    return rows
