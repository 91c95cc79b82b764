"""What a step returns, and what it must be: a pair of the state as it came, and metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxfleet.capture.signature import Signature
from jaxfleet.capture.trees import difference, leaf_names, leaves_of
from jaxfleet.errors import CaptureError
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.frames import line_of_function


@dataclass(frozen=True)
class Returned:
    """Says how what a step returned is built, without its values.

    Attributes:
        state_tree: the structure of the new state.
        metrics_tree: the structure of the metrics.
        metrics: a name for each of their leaves.
    """

    state_tree: Any
    metrics_tree: Any
    metrics: tuple[str, ...]


def read_returned(result: Any, step: Callable[..., Any]) -> Returned:
    """Reads the structure of what a step returned.

    Raises:
        CaptureError: it is no pair, or a metric is not an array.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        what = f"{_name(step)} returns {_described(result)}, not (state, metrics)"
        hint = "a training step returns (state, metrics); metrics may be an empty dict"
        raise CaptureError(what, source=line_of_function(step), hint=hint)
    state, metrics = result
    leaves_of(metrics, "metrics", source=line_of_function(step))
    structure = jax.tree_util.tree_structure
    names = tuple(leaf_names(metrics, "metrics", bare=False))
    return Returned(structure(state), structure(metrics), names)


def check_state(
    returned: Returned, avals: Sequence[Any], signature: Signature, step: Callable[..., Any]
) -> None:
    """Refuses a step whose state changes its structure or a leaf's type.

    Args:
        returned: from `read_returned`.
        avals: the types of what was returned, flat.
        signature: of the step's arguments.
        step: the user's function.

    Raises:
        CaptureError: the first leaf that differs, or where the structures do.
    """
    source = line_of_function(step)
    if returned.state_tree != signature.state_tree:
        if returned.metrics_tree == signature.state_tree:
            what = f"{_name(step)} returns (metrics, state)"
            raise CaptureError(what, source=source, hint="return (state, metrics), in this order")
        changed = difference(signature.state_tree, returned.state_tree)
        what = f"the state comes back with another structure: {changed}"
        hint = "return the state with the structure it came with"
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
