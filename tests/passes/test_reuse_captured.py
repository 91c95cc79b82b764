"""Captured steps that are drawn compute what they computed, whatever shares a name."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfleet as jf
from jaxfleet.analysis.rules import meaning_rules
from jaxfleet.ir import verify
from tests.passes.drawn_steps import drawn_step
from tests.passes.following import check_rewritten

RANDOMS = st.randoms(use_true_random=False)


@given(RANDOMS, st.sampled_from([0, 1]), st.data())
@settings(max_examples=12)
def test_operators_of_a_step_read_what_they_read(
    drawn: random.Random, level: int, data: st.DataObject
) -> None:
    train_step, example = drawn_step(drawn)
    program = jf.capture(train_step, example=example).program
    skip = data.draw(st.lists(st.sampled_from(sorted(program.root.variables)), max_size=4))
    made = jf.memory_optimize(program, [program.lookup(name) for name in skip], level=level)
    verify(made, more_rules=meaning_rules)
    assert check_rewritten(program, made, level=level, skip=skip).served
    released = jf.release_memory(made, {*skip})
    verify(released, more_rules=meaning_rules)
    check_rewritten(program, released, level=level, skip=skip)


@given(RANDOMS, st.sampled_from([0, 1]))
@settings(max_examples=3)
def test_a_step_gives_the_same_to_the_bit(drawn: random.Random, level: int) -> None:
    train_step, (state, batch) = drawn_step(drawn)
    found = []
    for passes in ("", f"memory_optimize{{level={level}}},release_memory"):
        strategy = jf.DistributedStrategy(mode="single", passes=passes, donate=False)
        step = jf.distribute(train_step, (state, batch), strategy)
        after, told = step(state, batch)
        found.append(plain(step(after, batch), told))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def plain(*values: Any) -> list[np.ndarray]:
    """Returns leaves as numpy arrays, keys too."""
    leaves = jax.tree.leaves(values)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    pairs = zip(leaves, is_key, strict=True)
    return [np.asarray(jax.random.key_data(x) if key else x) for x, key in pairs]
