"""Signature of a step: leaves of its state and batch, and checks of its results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import CaptureError
from jaxfleet.ir import Source
from jaxfleet.ir.naming import unique
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.user_frames import line_of_caller, line_of_function

_PREFIXES = ("state", "batch", "metrics")  # prefixes of the variables of the three trees
_LISTED = 8  # keys of a dict listed in a message
OTHER_ATTRIBUTE = "and is one with"  # in the message about nodes of the same class
_LONGEST = 40  # characters of an attribute in a message
_HINTS = {
    "argument": "bind what is not an array with functools.partial, static arguments too",
    "state": "keep what is not an array out of the pytree: close over it, or make the field static "
    "(flax.struct.field(pytree_node=False))",
    "batch": "pass one batch of arrays, such as next(iter(loader)), and leave out what is not an "
    "array",
    "metrics": "return arrays as metrics, and add names and the like outside of the step",
}


@dataclass(frozen=True)
class Leaf:
    """One leaf of the state, the batch or the metrics."""

    name: str  # its variable's name: `params/Dense_0/kernel`, `batch/image`, `metrics/loss`
    shape: tuple[int, ...]  # as in the example
    dtype: Any  # a numpy dtype, or jax's dtype of random keys
    weak: bool = False  # jax's weak type, as of a Python number


def path_text(path: Sequence[Any]) -> str:
    """Returns a pytree path as text: `Dense_0/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: Any, prefix: str, *, bare: bool) -> list[str]:
    """Returns a unique name for each leaf: its path after the prefix.

    `bare` omits the prefix if the path begins with a letter and not with any prefix.
    """
    names: dict[str, None] = {}
    others = tuple(f"{name}/" for name in _PREFIXES)
    for path, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_iterator)[0]:
        text = path_text(path)
        keep = bare and text[:1].isalpha() and not f"{text}/".startswith(others)
        keep |= text.startswith(f"{prefix}/")  # an argument of that name
        names[unique(text if keep else f"{prefix}/{text}" if text else prefix, names)] = None
    return list(names)


def leaves_of(
    tree: Any, prefix: str, *, bare: bool = False, source: Source | None = None
) -> list[Leaf]:
    """Returns the leaves of a pytree of arrays, array types and numbers.

    Raises:
        CaptureError: a leaf is something else; the error names its path, and points at `source`.
    """
    values = jax.tree_util.tree_leaves(tree, is_leaf=is_iterator)
    names = leaf_names(tree, prefix, bare=bare)
    leaves = []
    for name, value in zip(names, values, strict=True):
        leaf = _leaf(name, value)
        if leaf is None:
            raise _not_an_array(name, value, prefix, source)
        leaves.append(leaf)
    return leaves


def spec_of(leaf: Leaf, shape: Sequence[Any] | None = None) -> jax.ShapeDtypeStruct:
    """Returns the type that jax traces a leaf with, with another shape if given."""
    dims = tuple(leaf.shape if shape is None else shape)
    return jax.ShapeDtypeStruct(dims, leaf.dtype, weak_type=leaf.weak)


def difference(before: Any, after: Any, path: str = "") -> str:
    """Describes the first difference of two tree structures, which are at `path`."""
    was, now = before.node_data(), after.node_data()
    if was is None or now is None or was[0] is not now[0] or was[1] != now[1]:
        where = f"'{path}' was" if path else "it was"
        old, new = _node_text(before), _node_text(after)
        if old == new and was is not None and now is not None:
            return f"{where} {old} {_other_attribute(was[1], now[1])}"
        return f"{where} {old} and is {new}"
    names = _child_names(before)
    children = zip(names, before.children(), after.children(), strict=True)
    for name, x, y in children:
        if x != y:
            return difference(x, y, f"{path}/{name}" if path else str(name))
    return f"'{path}' changed"


def _other_attribute(before: Any, after: Any, name: str = "") -> str:
    """Describes the first difference of what two nodes of one class hold beside their children.

    In a node of flax's nnx a tuple of names comes before the tuple of their values.
    """
    at = _first_unlike(before, after)
    if at is not None:
        names = before[at - 1] if at else ()
        x, y = before[at], after[at]
        inner = _first_unlike(x, y)
        if inner is not None and isinstance(names, tuple) and len(names) == len(x):
            return _other_attribute(x[inner], y[inner], str(names[inner]))
        return _other_attribute(x, y, name)
    old, new = (str(getattr(x, "__qualname__", x)) for x in (before, after))
    said = f"{name}=" if name else ""
    if old == new or max(len(old), len(new)) > _LONGEST:
        return f"{OTHER_ATTRIBUTE} another {name or 'static attribute'}"
    return f"with {said}{old} {OTHER_ATTRIBUTE} {said}{new}"


def _first_unlike(before: Any, after: Any) -> int | None:
    """Returns the place of the first difference of two tuples of one length; None for others."""
    if not (isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after)):
        return None
    return next((at for at, (x, y) in enumerate(zip(before, after, strict=True)) if x != y), None)


def is_iterator(value: Any) -> bool:
    """Whether a value is a generator or similar, of which jax would warn."""
    return isinstance(value, Iterator)


def _node_text(structure: Any) -> str:
    node = structure.node_data()
    if node is None:
        return "a leaf" if structure.num_leaves else "None"
    kind, names = node[0], _child_names(structure)
    if kind is type(None):
        return "None"
    if names and isinstance(names[0], str):
        return f"a {kind.__name__} with {', '.join(names[:_LISTED])}"
    return f"a {kind.__name__} of {len(names)}"


def _child_names(structure: Any) -> list[Any]:
    kind, facts = structure.node_data()
    if issubclass(kind, dict):
        return list(facts)
    return list(getattr(kind, "_fields", range(len(structure.children()))))


def _leaf(name: str, value: Any) -> Leaf | None:
    """Returns a leaf's description, or None unless it is an array."""
    if isinstance(value, bool | int | float | complex):
        return Leaf(name, (), jnp.result_type(value), weak=True)
    if isinstance(value, np.ndarray | np.generic):
        is_number = value.dtype.kind not in "OSUMm" and value.dtype.type is not np.void
        dtype = jax.dtypes.canonicalize_dtype(value.dtype) if is_number else None
        return Leaf(name, value.shape, dtype) if is_number else None
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return Leaf(name, value.shape, value.dtype, bool(getattr(value, "weak_type", False)))
    return None


def _not_an_array(name: str, value: Any, what_tree: str, source: Source | None) -> CaptureError:
    kind = f"dtype {value.dtype}" if isinstance(value, np.ndarray) else f"type {_type_name(value)}"
    what = f"the {what_tree} leaf '{name}' is of {kind}, not an array of numbers"
    return CaptureError(what, source=source, hint=_HINTS[what_tree])


def _type_name(value: Any) -> str:
    return type(value).__name__


@dataclass(frozen=True)
class Signature:
    """Mapping of a step's pytrees to variables."""

    state: tuple[Leaf, ...]  # leaves of the state, in order
    batch: tuple[Leaf, ...]  # leaves of the batch, in order
    state_tree: Any  # the state's structure
    batch_tree: Any  # the batch's structure
    rows: int  # the example's global batch size

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
    """Structure of a step's results, without values."""

    state_tree: Any  # the structure of the new state
    metrics_tree: Any  # the structure of the metrics
    metrics: tuple[str, ...]  # a name for each of their leaves


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
