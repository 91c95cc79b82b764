"""A key that a step draws from and never advances is named when the step is distributed."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import jaxfleet as jf
from jaxfleet.analysis.step_checks import repeated_key_warning

X = jnp.arange(24.0).reshape(8, 3)
TX = jf.distributed_optimizer(optax.sgd(0.1))


def masked(state: Any, batch: Any, key: Any) -> Any:
    """Returns the parameters after a step with dropout by a key."""

    def loss_of(w: Any) -> Any:
        h = batch @ w
        return jnp.mean(h * jax.random.bernoulli(key, 0.5, h.shape))

    updates, _ = TX.update(jax.grad(loss_of)(state["w"]), TX.init(state["w"]), state["w"])
    return state["w"] + updates


def never_advanced(state: Any, batch: Any) -> Any:
    return {**state, "w": masked(state, batch, state["key"])}, {}


def split_and_dropped(state: Any, batch: Any) -> Any:
    _, sub = jax.random.split(state["key"])
    return {**state, "w": masked(state, batch, sub)}, {}


def folded_with_a_number(state: Any, batch: Any) -> Any:
    key = jax.random.fold_in(state["key"], 7)
    return {**state, "w": masked(state, batch, key)}, {}


def folded_with_a_step_that_stands(state: Any, batch: Any) -> Any:
    key = jax.random.fold_in(state["key"], state["step"])
    return {**state, "w": masked(state, batch, key)}, {}


def inside_a_loop(state: Any, batch: Any) -> Any:
    def turn(carry: Any, _: Any) -> Any:
        w, key = carry
        key, sub = jax.random.split(key)
        return (masked({"w": w}, batch, sub), key), None

    (w, _), _ = lax.scan(turn, (state["w"], state["key"]), None, length=2)
    return {**state, "w": w}, {}


def advanced(state: Any, batch: Any) -> Any:
    key, sub = jax.random.split(state["key"])
    return {**state, "w": masked(state, batch, sub), "key": key}, {}


def folded_with_the_step(state: Any, batch: Any) -> Any:
    key = jax.random.fold_in(state["key"], state["step"])
    return {**state, "w": masked(state, batch, key), "step": state["step"] + 1}, {}


def folded_in_a_loop_with_the_step(state: Any, batch: Any) -> Any:
    def turn(w: Any, number: Any) -> Any:
        key = jax.random.fold_in(state["key"], state["step"] * 2 + number)
        return masked({"w": w}, batch, key), None

    w, _ = lax.scan(turn, state["w"], jnp.arange(2))
    return {**state, "w": w, "step": state["step"] + 1}, {}


def folded_with_the_batch(state: Any, batch: Any) -> Any:
    key = jax.random.fold_in(state["key"], batch.sum().astype(int))
    return {**state, "w": masked(state, batch, key)}, {}


def seeded_in_the_step(state: Any, batch: Any) -> Any:
    return {**state, "w": masked(state, batch, jax.random.key(3))}, {}


def seeded_and_folded_with_the_step(state: Any, batch: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(3), state["step"])
    return {**state, "w": masked(state, batch, key), "step": state["step"] + 1}, {}


def seeded_nnx_rngs(state: Any, batch: Any) -> Any:
    return {**state, "w": masked(state, batch, nnx.Rngs(5)())}, {}


def seeded_for_a_metric(state: Any, batch: Any) -> Any:
    sample = jax.random.bernoulli(jax.random.key(3), 0.5, batch.shape)
    return draws_nothing(state, batch)[0], {"sample": (batch * sample).sum()}


def draws_nothing(state: Any, batch: Any) -> Any:
    return {**state, "w": state["w"] - batch.sum()}, {}


def warning_of(step: Callable[[Any, Any], Any], make: Any = jax.random.key) -> str | None:
    state = {"w": jnp.ones((3, 2)), "key": make(0), "step": jnp.int32(0)}
    return repeated_key_warning(jf.capture(step, example=(state, X)).program)


@pytest.mark.parametrize(
    "step",
    [
        never_advanced,
        split_and_dropped,
        folded_with_a_number,
        folded_with_a_step_that_stands,
        inside_a_loop,
    ],
)
def test_a_key_that_is_never_advanced_is_warned_of(step: Any) -> None:
    warning = warning_of(step)
    assert warning is not None
    assert warning.startswith("'key' is drawn from (analysis/test_repeated_keys.py:")
    assert "key, sub = jax.random.split(state.key)" in warning
    assert "jax.random.fold_in(state.key, step)" in warning


@pytest.mark.parametrize(
    "step",
    [
        advanced,
        folded_with_the_step,
        folded_in_a_loop_with_the_step,
        folded_with_the_batch,
        seeded_and_folded_with_the_step,
        seeded_for_a_metric,
        draws_nothing,
    ],
)
def test_a_key_that_changes_or_is_meant_to_stay_is_not_warned_of(step: Any) -> None:
    assert warning_of(step) is None


@pytest.mark.parametrize("step", [seeded_in_the_step, seeded_nnx_rngs])
def test_a_key_that_the_step_makes_of_a_constant_seed_is_warned_of(step: Any) -> None:
    warning = warning_of(step)
    assert warning is not None
    assert "drawn (analysis/test_repeated_keys.py:" in warning
    assert "makes of a constant seed: they are the same at every step" in warning


@pytest.mark.parametrize("step", [never_advanced, advanced])
def test_a_key_of_integers_is_followed_as_a_typed_one_is(step: Any) -> None:
    assert (warning_of(step, jax.random.PRNGKey) is not None) == (step is never_advanced)


def test_a_key_that_is_bound_to_the_step_is_warned_of() -> None:
    def step(key: Any, state: Any, batch: Any) -> Any:
        return {**state, "w": masked(state, batch, key)}, {}

    warning = warning_of(functools.partial(step, jax.random.key(1)))
    assert warning is not None
    assert "from a key that the step closes over" in warning
    assert "step(state, batch, key)" in warning


def test_distribute_warns_at_the_users_line() -> None:
    state = {"w": jnp.ones((3, 2)), "key": jax.random.key(0)}
    with pytest.warns(UserWarning, match="'key' is drawn from") as got:
        jf.distribute(never_advanced, (state, X), "single")
    assert [warning.filename for warning in got] == [__file__]


def test_a_key_that_is_an_argument_beside_a_teacher_is_not_warned_of() -> None:
    def step(state: Any, batch: Any, extra: Any) -> Any:
        shifted = batch - extra["teacher"]["a"].sum() - extra["teacher"]["b"].sum()
        return {**state, "w": masked(state, shifted, extra["key"])}, {}

    teacher = {"a": jnp.ones((5, 2)), "b": jnp.ones(3)}
    extra = {"teacher": teacher, "key": jax.random.key(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jf.distribute(step, ({"w": jnp.ones((3, 2))}, X, extra), "single")


@pytest.mark.parametrize("returned", [True, False])
def test_the_counter_of_nnx_rngs_must_come_back_in_the_state(returned: bool) -> None:
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graph, rngs = nnx.split(model)

    def step(state: Any, batch: Any) -> Any:
        def loss_of(w: Any) -> Any:
            dropout = nnx.merge(graph, state["rngs"], copy=True)
            return jnp.mean(dropout(batch @ w)), nnx.state(dropout)

        grads, rngs = jax.grad(loss_of, has_aux=True)(state["w"])
        updates, _ = TX.update(grads, TX.init(state["w"]), state["w"])
        rngs = rngs if returned else state["rngs"]
        return {"w": state["w"] + updates, "rngs": rngs}, {}

    program = jf.capture(step, example=({"w": jnp.ones((3, 2)), "rngs": rngs}, X)).program
    assert (repeated_key_warning(program) is None) == returned
