"""Names and types of a pytree's leaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import CaptureError
from jaxfleet.ir.names import unique


@dataclass(frozen=True)
class Leaf:
    """One leaf of the state, the batch or the metrics.

    Attributes:
        name: its variable's name: `params/Dense_0/kernel`, `batch/image`, `metrics/loss`.
        shape: as the example has it.
        dtype: a numpy dtype, or jax's dtype of random keys.
        weak: jax's weak type, as a Python number has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    weak: bool = False


def path_text(path: Sequence[Any]) -> str:
    """Returns a pytree path as text: `Dense_0/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: Any, prefix: str, *, bare: bool) -> list[str]:
    """Returns a unique name for each leaf.

    Args:
        tree: any pytree.
        prefix: goes before each path.
        bare: leave the prefix out where the path begins with a letter.
    """
    names: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        text = path_text(path)
        keep = bare and text[:1].isalpha()
        names[unique(text if keep else f"{prefix}/{text}" if text else prefix, names)] = None
    return list(names)


def leaves_of(tree: Any, prefix: str, *, bare: bool = False) -> list[Leaf]:
    """Returns the leaves of a pytree of arrays, array types and numbers.

    Raises:
        CaptureError: a leaf is something else; the error names its path.
    """
    values = jax.tree_util.tree_leaves(tree)
    names = leaf_names(tree, prefix, bare=bare)
    return [_leaf(name, value, prefix) for name, value in zip(names, values, strict=True)]


def spec_of(leaf: Leaf, shape: Sequence[Any] | None = None) -> jax.ShapeDtypeStruct:
    """Returns the type that jax traces a leaf with, with another shape if given."""
    dims = tuple(leaf.shape if shape is None else shape)
    return jax.ShapeDtypeStruct(dims, leaf.dtype, weak_type=leaf.weak)


def _leaf(name: str, value: Any, what_tree: str) -> Leaf:
    if isinstance(value, bool | int | float | complex):
        return Leaf(name, (), jnp.result_type(value), weak=True)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSUMmV":
        raise _not_an_array(name, f"a numpy array of dtype {value.dtype}", what_tree)
    if isinstance(value, np.ndarray | np.generic):
        return Leaf(name, value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return Leaf(name, value.shape, value.dtype, bool(getattr(value, "weak_type", False)))
    raise _not_an_array(name, f"a {type(value).__name__}", what_tree)


def _not_an_array(name: str, found: str, what_tree: str) -> CaptureError:
    what = f"the {what_tree} leaf '{name}' is {found}, not an array"
    hint = (
        "keep what is not an array out of the pytree: close over it, or mark the field static "
        "(flax.struct.field(pytree_node=False))"
    )
    return CaptureError(what, hint=hint)
