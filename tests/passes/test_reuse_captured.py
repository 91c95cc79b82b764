"""Drawn captured steps keep their results when names are shared."""

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfleet as jf
from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.ir import verify
from jaxfleet.passes import GradAllreduce
from jaxfleet.pipeline import run_pipeline
from tests.passes.drawn_steps import drawn_step
from tests.passes.following import check_rewritten

RANDOMS = st.randoms(use_true_random=False)


@pytest.mark.grid
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


@pytest.mark.grid
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


@pytest.mark.grid
@pytest.mark.parametrize(("seed", "level"), [(1, 0), (3, 1), (6, 1)])
def test_a_program_is_divided_behind_it_and_before_it(seed: int, level: int) -> None:
    train_step, (state, batch) = drawn_step(random.Random(seed))
    captured = jf.capture(train_step, example=(state, batch))
    shared = jf.memory_optimize(captured.program, set(captured.metrics), level=level)
    assert any("instead_of" in op.attrs for op in shared.root.ops)
    data = [leaf.name for leaf in captured.signature.batch]
    fed = dict(zip(data, jax.tree.leaves(batch), strict=True))
    names = [leaf.name for leaf in captured.signature.state]
    seen, divide = list[Any](), [GradAllreduce(devices=2)]
    behind = jf.memory_optimize(run_pipeline(captured.program, divide), level=level)
    before = run_pipeline(shared, divide, rules=meaning_rules)
    for program in (run_pipeline(captured.program, divide), before, behind):
        exe = jf.Executor()
        exe.scope.update(zip(names, jax.tree.leaves(state), strict=True))
        told = exe.run(program, feed=fed, fetch=captured.metrics)
        seen.append(plain(told, [exe.scope[name] for name in names]))
    jobs = [jf.Twin(replace(captured, program=x)) for x in (captured.program, shared)]
    ends = [job.run(state, [batch, batch]) for job in jobs]
    made = [plain(end.states, end.metrics) for end in ends]
    for x, y in zip(seen[0], seen[2], strict=True):
        np.testing.assert_array_equal(x, y)
    # If distributed after names were shared, some drawn steps differed in the last digits.
    for one, other in [(seen[0], seen[1]), (made[0], made[1])]:
        for x, y in zip(one, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def plain(*values: Any) -> list[np.ndarray]:
    """Returns leaves as numpy arrays, including keys."""
    leaves = jax.tree.leaves(values)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    pairs = zip(leaves, is_key, strict=True)
    return [np.asarray(jax.random.key_data(x) if key else x) for x, key in pairs]
