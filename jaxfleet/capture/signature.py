"""Signature of a step: leaves of its state and batch, and checks of its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxfleet.capture.pytrees import OTHER_ATTRIBUTE, Leaf, difference, leaf_names, leaves_of
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Source
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.user_frames import line_of_caller, line_of_function


@dataclass(frozen=True)
class Signature:
    """Mapping of a step's pytrees to variables.

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
        """Reads the signature from an example.

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


@dataclass(frozen=True)
class Outputs:
    """Structure of a step's results, without values.

    Attributes:
        state_tree: the structure of the new state.
        metrics_tree: the structure of the metrics.
        metrics: a name for each of their leaves.
    """

    state_tree: Any
    metrics_tree: Any
    metrics: tuple[str, ...]


def read_outputs(result: Any, step: Callable[..., Any]) -> Outputs:
    """Reads the structure of a step's results.

    Raises:
        CaptureError: they are not a pair, or a metric is not an array.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        what = f"{_name(step)} returns {_described(result)}, not (state, metrics)"
        hint = "a training step returns (state, metrics); metrics may be an empty dict"
        raise CaptureError(what, source=line_of_function(step), hint=hint)
    state, metrics = result
    leaves_of(metrics, "metrics", source=line_of_function(step))
    structure = jax.tree_util.tree_structure
    names = tuple(leaf_names(metrics, "metrics", bare=False))
    return Outputs(structure(state), structure(metrics), names)


def check_state(
    returned: Outputs, avals: Sequence[Any], signature: Signature, step: Callable[..., Any]
) -> None:
    """Rejects a step whose state changes its structure or a leaf's type.

    `avals` are the types of its results, flat; the error names the first difference.
    """
    source = line_of_function(step)
    if returned.state_tree != signature.state_tree:
        if returned.metrics_tree == signature.state_tree:
            what = f"{_name(step)} returns (metrics, state)"
            raise CaptureError(what, source=source, hint="return (state, metrics), in this order")
        changed = difference(signature.state_tree, returned.state_tree)
        what = f"the state comes back with another structure: {changed}"
        hint = "return the state with the structure it came with"
        if OTHER_ATTRIBUTE in changed:
            hint += "; call model.train() and model.eval() of an nnx model outside of the step"
        raise CaptureError(what, source=source, hint=hint)
    for leaf, aval in zip(signature.state, avals, strict=False):
        if tuple(aval.shape) != leaf.shape or aval.dtype != leaf.dtype:
            before, after = _type(leaf), _type(aval)
            what = f"the state leaf '{leaf.name}' goes in as {before} and comes out as {after}"
            hint = "cast or reshape it back, or start with the type it ends with"
            raise CaptureError(what, source=source, hint=hint)


def _name(step: Callable[..., Any]) -> str:
    return str(getattr(step, "__name__", "the step"))


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return "nothing" if result is None else f"a {type(result).__name__}"


def _type(value: Any) -> str:
    shape = ",".join(map(str, value.shape))
    return f"{jax_adapter.dtype_text(value.dtype)}[{shape}]"
