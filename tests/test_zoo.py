"""Every program of the zoo: it trains on one device, is captured, and is rewritten for several.

The file is one, so that a worker captures each program once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.errors import InconclusiveDimensionOperation

from jaxfleet.analysis.rules import meaning_rules
from jaxfleet.ir import parse, print_program, verify
from jaxfleet.passes import GradAllreduce
from tests.shared_zoo import captured_zoo, one_device
from tests.zoo import TRAITS, ZOO, Case, having, lacking

STEPS = 3
CAPTURED = [entry.name for entry in lacking("marker_inside")]


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
    plain = one_device(entry.name)
    state, signatures = plain.built.state, []
    for i in range(STEPS):
        state, metrics = plain.step(state, plain.built.batch(i, entry.rows))
        signatures.append((signature(state), signature(metrics)))
        assert all_finite((state, metrics)), f"step {i} made values that are not finite"
    assert signatures[0] == signatures[1] == signatures[2]


@pytest.mark.parametrize("entry", every_entry())
def test_a_batch_depends_on_its_step_and_size_only(entry: Case) -> None:
    batch = one_device(entry.name).built.batch
    for first, again in zip(
        jax.tree.leaves(batch(1, entry.rows)), jax.tree.leaves(batch(1, entry.rows)), strict=True
    ):
        assert first.shape[0] == entry.rows
        np.testing.assert_array_equal(first, again)


@pytest.mark.grid  # the default run asks it of captures: test_a_captured_entry_keeps_its_letter...
@pytest.mark.parametrize("entry", every_entry())
def test_an_entry_traces_with_a_letter_unless_it_says_otherwise(entry: Case) -> None:
    built = one_device(entry.name).built
    (rows,) = export.symbolic_shape("b")

    def lettered(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    batch = jax.tree.map(lettered, built.batch(0, entry.rows))
    if "no_symbolic" not in entry.traits:
        jax.eval_shape(built.train_step, built.state, batch)
        return
    with pytest.raises((InconclusiveDimensionOperation, TypeError)):
        jax.eval_shape(built.train_step, built.state, batch)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_entry_is_valid_and_reads_back_as_it_was(name: str) -> None:
    program = captured_zoo(name).program
    verify(program)
    assert parse(print_program(program)) == program
    assert parse(print_program(program, source=True)) == program


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_entry_keeps_its_letter_unless_it_says_otherwise(name: str) -> None:
    captured = captured_zoo(name)
    by_size = not ZOO[name].traits.isdisjoint({"no_symbolic", "size_branch"})
    assert (captured.rows is not None) == by_size
    assert bool(captured.notes) == by_size


@pytest.mark.parametrize("name", CAPTURED)
def test_the_verifier_accepts_an_entry_rewritten_for_four_devices(name: str) -> None:
    rewritten = GradAllreduce(devices=4).run(captured_zoo(name).program)
    verify(rewritten, more_rules=meaning_rules)


def test_every_trait_has_an_entry_and_the_core_has_twelve() -> None:
    assert all(having(trait) for trait in TRAITS)
    assert len(having("core")) == 12
