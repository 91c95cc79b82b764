"""State is updated in place if that is safe, otherwise through copies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import jaxfleet as jf
from jaxfleet.ir import verify
from jaxfleet.ops import Interpreter
from tests.capture.common import assert_same_as_the_step, op_types

BATCH = np.ones((4, 2), np.float32)


def program_text(step: Any, state: Any) -> str:
    captured = assert_same_as_the_step(step, state, BATCH)
    verify(captured.program)
    return str(captured.program)


def scalars(**values: float) -> dict[str, jax.Array]:
    return {name: jnp.float32(value) for name, value in values.items()}


def test_new_state_is_written_over_the_old() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"a": state["a"] + batch.sum()}, {}

    assert "a = jax.add(a, reduce_sum.1)" in program_text(step, scalars(a=1))


def test_new_state_is_not_written_while_the_old_is_still_read() -> None:
    def step(state: Any, batch: Any) -> Any:
        new = state["a"] + 1.0
        return {"a": new, "b": state["b"] + jnp.sin(state["a"]) + new}, {}

    text = program_text(step, scalars(a=1, b=2))
    assert text.index("jax.sin(a)") < text.index("a = assign(")


def test_a_swap_goes_through_a_copy() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"a": state["b"], "b": state["a"]}, {}

    text = program_text(step, scalars(a=1, b=2))
    assert "a.old: f32[] = assign(a)" in text
    assert "b = assign(a.old)" in text


def test_a_rotation_moves_every_value_once() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"a": state["b"], "b": state["c"], "c": state["a"]}, {}

    program_text(step, scalars(a=1, b=2, c=3))


def test_what_passes_through_has_no_operator() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, {}

    captured = assert_same_as_the_step(step, scalars(a=1, b=2), BATCH)
    assert op_types(captured.program) == []


def test_a_metric_may_show_the_old_state_and_the_new() -> None:
    def step(state: Any, batch: Any) -> Any:
        new = state["a"] * 2.0
        return {"a": new}, {"old": state["a"], "new": new, "again": new}

    text = program_text(step, scalars(a=3))
    assert "metrics/old: f32[] = assign(a)" in text
    assert "fetch(metrics/again, metrics/new, metrics/old)" in text


def test_two_leaves_may_be_set_to_one_value() -> None:
    def step(state: Any, batch: Any) -> Any:
        new = state["a"] + state["b"]
        return {"a": new, "b": new}, {}

    text = program_text(step, scalars(a=1, b=2))
    assert text.count("jax.add") == 1
    assert "assign" in text


def test_a_leaf_may_be_set_to_a_constant() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"a": jnp.float32(7), "v": jnp.arange(3.0), "w": jnp.zeros(2)}, {}

    state = {**scalars(a=1), "v": jnp.ones(3), "w": jnp.ones(2)}
    assert "a = assign(7.0:f32)" in program_text(step, state)


def test_a_leaf_may_be_set_to_a_part_of_the_batch() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"row": batch[0]}, {"row": state["row"], "batch": batch}

    program_text(step, {"row": jnp.zeros(2)})


def test_a_gradient_may_be_kept_in_the_state() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(batch @ w).mean())(state["w"])
        updates, _ = tx.update(grads, tx.init(state["w"]), state["w"])
        return {"w": state["w"] + updates, "last": grads}, {"grads": grads}

    text = program_text(step, {"w": jnp.ones(2), "last": jnp.zeros(2)})
    assert "last = assign(w@GRAD)" in text


LEAVES = ("a", "b", "c", "d")


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(LEAVES), st.sampled_from(LEAVES), st.sampled_from("=+k2")),
        min_size=4,
        max_size=4,
    ),
    shown=st.lists(st.sampled_from([*LEAVES, *(f"new {name}" for name in LEAVES)]), max_size=4),
)
def test_any_update_gives_what_the_step_gives(
    moves: list[tuple[str, str, str]], shown: list[str]
) -> None:
    def step(state: Any, batch: Any) -> Any:
        new: dict[str, jax.Array] = {}
        for name, (left, right, how) in zip(LEAVES, moves, strict=True):
            made = {"+": state[left] + state[right], "k": jnp.float32(5), "=": state[left]}
            new[name] = made[how] if how in made else new.get(left, state[left] * 2.0)
        values = {**state, **{f"new {name}": value for name, value in new.items()}}
        return new, {str(place): values[name] for place, name in enumerate(shown)}

    state = scalars(a=1, b=2, c=3, d=4)
    captured = jf.capture(step, example=(state, BATCH))
    verify(captured.program)
    assert_eager(captured, step, state)


def assert_eager(captured: jf.Captured, step: Any, state: Any) -> None:
    after = Interpreter(captured.program, {"b": len(BATCH)}).run({**state, "batch": BATCH})
    new, metrics = step(state, BATCH)
    assert {name: float(after[name]) for name in state} == jax.tree.map(float, new)
    found = [float(after[name]) for name in captured.metrics]
    assert found == [float(value) for value in jax.tree.leaves(metrics)]
