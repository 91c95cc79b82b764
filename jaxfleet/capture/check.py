"""Compares a step that was traced with a letter with the same step traced at a number of rows.

A Python branch on the batch size takes one side in silence when the size is a letter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.analysis.fingerprint import Numbering
from jaxfleet.capture.signature import Signature
from jaxfleet.capture.trace import BATCH_LETTER, Traced
from jaxfleet.capture.trees import Leaf
from jaxfleet.ir import Kind, Operator, Program
from jaxfleet.ops import Array, Interpreter


@dataclass(frozen=True)
class Difference:
    """Says in what two traces of one step differ.

    Attributes:
        names: state leaves and metrics that come out otherwise.
        op: the first operator of the second trace that the first has not, or of the first that
            the second has not.
    """

    names: tuple[str, ...]
    op: Operator | None


_NOISE = 0.1  # added to float state: zeros would hide what they are multiplied with


def unlike(left: Traced, right: Traced, rows: int) -> Difference | None:
    """Returns how two traces of one step are built otherwise, dead operators aside.

    Args:
        left: traced with a letter, or with a number of rows.
        right: traced with a number of rows.
        rows: what the letter stands for.
    """
    numbering = Numbering({BATCH_LETTER: rows})
    before, after = numbering.of(left.program), numbering.of(right.program)
    names = tuple(name for name in _returned(left) if before[name] != after[name])
    if not names:
        return None

    def new(program: Program, numbers: Mapping[str, int], others: Mapping[str, int]) -> Any:
        known = set(others.values())
        for op in program.root.ops:
            made = [numbers[name] for name in op.writes]
            if not known.issuperset(made) and numbering.known(made) is None:
                return op
        return None

    first = new(right.program, after, before) or new(left.program, before, after)
    return Difference(names, first)


def different_results(
    symbolic: Traced, concrete: Traced, signature: Signature, leaves: Sequence[Any], rows: int
) -> Difference | None:
    """Returns how a step traced with a letter differs from one traced at a number of rows.

    Programs that are built alike are not run. Where they are not, since jax may do things in
    another way under a letter, both are run on the example's values.

    Args:
        symbolic: traced with a letter.
        concrete: traced with `rows` rows.
        signature: of the example.
        leaves: the example's values, state first; types will do.
        rows: what the letter stands for; the example's rows are repeated or left out to fit.
    """
    found = unlike(symbolic, concrete, rows)
    if found is None:
        return None
    values = _values(signature, leaves, rows)
    names = _differing(symbolic, concrete, found.names, values, rows)
    return replace(found, names=tuple(names)) if names else None


def _differing(
    symbolic: Traced, concrete: Traced, names: Sequence[str], values: dict[str, Array], rows: int
) -> list[str]:
    """Returns the names that hold other values after one program than after the other."""

    def run_both(values: dict[str, Array]) -> tuple[list[Array], list[Array]]:
        left = Interpreter(symbolic.program, {BATCH_LETTER: rows}).run(values)
        right = Interpreter(concrete.program, {}).run(values)
        return [left[name] for name in names], [right[name] for name in names]

    left, right = jax.jit(run_both)(values)
    return [name for name, x, y in zip(names, left, right, strict=True) if not _are_close(x, y)]


def _returned(traced: Traced) -> list[str]:
    lasting = traced.program.of_kind(Kind.PARAM, Kind.STATE)
    return [*(variable.name for variable in lasting), *traced.metrics]


def _values(signature: Signature, leaves: Sequence[Any], rows: int) -> dict[str, Array]:
    count = len(signature.state)
    values = {
        leaf.name: _perturbed(_value(leaf, value), seed)
        for seed, (leaf, value) in enumerate(zip(signature.state, leaves[:count], strict=True))
    }
    for leaf, value in zip(signature.batch, leaves[count:], strict=True):
        array = _value(leaf, value)
        places = np.arange(rows) % max(signature.rows, 1)
        values[leaf.name] = array[places] if leaf.shape else array
    return values


def _value(leaf: Leaf, value: Any) -> Array:
    """Returns a leaf's value; zeros where the example gives only its type."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return value if _is_readable(value) else _keys(leaf)
    if not _is_readable(value):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jnp.asarray(value, leaf.dtype)


def _is_readable(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not value.is_deleted() and value.is_fully_addressable
    return not isinstance(value, jax.ShapeDtypeStruct)


def _keys(leaf: Leaf) -> Array:
    made = (jax.random.key(0, impl=name) for name in ("threefry2x32", "rbg", "unsafe_rbg"))
    key = next(key for key in made if key.dtype == leaf.dtype)
    return jnp.broadcast_to(key, leaf.shape)


def _perturbed(value: Array, seed: int) -> Array:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    noise = jax.random.uniform(jax.random.key(seed), value.shape, jnp.float32, 0.0, _NOISE)
    return value + noise.astype(value.dtype)


def _are_close(x: Array, y: Array) -> bool:
    """Tells whether two results differ by no more than the order of their sums accounts for."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return bool((x == y).all())
    allowed = float(jnp.finfo(x.dtype).eps) ** 0.5  # type: ignore[no-untyped-call]  # jax's own
    scale = jnp.max(jnp.abs(y), initial=0.0, where=jnp.isfinite(y))
    return bool(jnp.allclose(x, y, rtol=allowed, atol=allowed * scale, equal_nan=True))
