"""The programs of the zoo run on one device; what is compared with them elsewhere is sound."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.errors import InconclusiveDimensionOperation

from tests.zoo import TRAITS, ZOO, Case, having, identity

STEPS = 3


def every_entry() -> list[Any]:
    return [pytest.param(entry, id=name) for name, entry in ZOO.items()]


def signature(tree: Any) -> Any:
    """Returns the tree's structure, and the type of each leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [jax.typeof(leaf) for leaf in leaves]


def all_finite(tree: Any) -> bool:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.number)]
    return all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)


@pytest.mark.parametrize("entry", every_entry())
def test_an_entry_trains_on_one_device(entry: Case) -> None:
    built = entry.build(identity)
    step = jax.jit(built.train_step)
    state, signatures = built.state, []
    for i in range(STEPS):
        state, metrics = step(state, built.batch(i, entry.rows))
        signatures.append((signature(state), signature(metrics)))
        assert all_finite((state, metrics)), f"step {i} made values that are not finite"
    assert signatures[0] == signatures[1] == signatures[2]


@pytest.mark.parametrize("entry", every_entry())
def test_a_batch_depends_on_its_step_and_size_only(entry: Case) -> None:
    batch = entry.build(identity).batch
    for first, again in zip(
        jax.tree.leaves(batch(1, entry.rows)), jax.tree.leaves(batch(1, entry.rows)), strict=True
    ):
        assert first.shape[0] == entry.rows
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("entry", every_entry())
def test_an_entry_traces_with_a_letter_unless_it_says_otherwise(entry: Case) -> None:
    built = entry.build(identity)
    (rows,) = export.symbolic_shape("b")

    def lettered(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    batch = jax.tree.map(lettered, built.batch(0, entry.rows))
    if "no_symbolic" not in entry.traits:
        jax.eval_shape(built.train_step, built.state, batch)
        return
    with pytest.raises((InconclusiveDimensionOperation, TypeError)):
        jax.eval_shape(built.train_step, built.state, batch)


def test_every_trait_has_an_entry_and_the_core_has_twelve() -> None:
    assert all(having(trait) for trait in TRAITS)
    assert len(having("core")) == 12
