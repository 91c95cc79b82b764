"""Unusual but valid programs: steps of every kind of callable, odd examples."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.ir import Kind
from tests.mistakes.common import Batch, State, batch, training, wrapped

STEP, STATE = training(wrapped())


class Trainer:
    """Has its step as a method, and is callable as a step."""

    def step(self, state: State, batch: Batch) -> Any:
        return STEP(state, batch)

    __call__ = step


def scaled(rate: float, state: State, batch: Batch) -> Any:
    return STEP(state, batch)


def with_default(state: State, batch: Batch, train: bool = True) -> Any:
    return STEP(state, batch)


def with_stars(*both: Any) -> Any:
    return STEP(*both)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (jax.jit(STEP, donate_argnums=0), "step"),
        (Trainer().step, "step"),
        (Trainer(), "Trainer"),
        (partial(scaled, 0.5), "scaled"),
        (jax.jit(partial(scaled, 0.5)), "scaled"),
        (with_default, "with_default"),
        (with_stars, "with_stars"),
    ],
    ids=["jitted", "a method", "an object", "a partial", "a jitted partial", "a default", "stars"],
)
def test_any_callable_may_be_a_step(step: Any, name: str) -> None:
    captured = jf.capture(step, example=(STATE, batch()))
    assert captured.program.name == name
    assert len(captured.program.of_kind(Kind.PARAM)) == 2


def test_a_step_may_train_nothing() -> None:
    captured = jf.capture(
        lambda state, batch: (state, STEP(state, batch)[1]), example=(STATE, batch())
    )
    assert captured.metrics == ("metrics/loss",)


def test_metrics_may_be_numbers_and_nothing() -> None:
    def step(state: State, batch: Batch) -> Any:
        return STEP(state, batch)[0], {"rate": 0.1, "ones": np.ones(3), "none": None}

    captured = jf.capture(step, example=(STATE, batch()))
    assert captured.metrics == ("metrics/ones", "metrics/rate")


def test_types_serve_as_an_example() -> None:
    example = jax.eval_shape(lambda: (STATE, batch()))
    assert (
        jf.capture(STEP, example=example).program
        == jf.capture(STEP, example=(STATE, batch())).program
    )


def test_a_batch_may_hold_scalars_and_bfloat16() -> None:
    def step(state: State, batch: Batch) -> Any:
        state, metrics = STEP(state, {"x": batch["x"].astype(jnp.float32), "y": batch["y"]})
        return state, {"loss": metrics["loss"] * batch["weight"]}

    odd = {**batch(), "x": batch()["x"].astype(ml_dtypes.bfloat16), "weight": 0.5}
    program = jf.capture(step, example=(STATE, odd)).program
    assert program.variables["batch/x"].type == "bf16[b,4]"
    assert program.variables["batch/weight"].type == "f32[]"


def test_a_used_up_state_still_serves_as_an_example() -> None:
    state = jax.tree.map(jnp.copy, STATE)
    jax.jit(STEP, donate_argnums=0)(state, batch())
    assert jf.capture(STEP, example=(state, batch())).rows is None


def test_wide_numpy_arrays_are_narrowed_with_a_note() -> None:
    wide = jax.tree.map(lambda x: x.astype(np.float64), batch())
    captured = jf.capture(STEP, example=(STATE, wide))
    note = "batch/x, batch/y: float64 is taken as float32, since jax_enable_x64 is off"
    assert captured.notes == (note,)


def test_an_optimizer_may_be_given_more_than_gradients() -> None:
    tx = jf.distributed_optimizer(optax.polyak_sgd())

    def step(state: State, batch: Batch) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.square(batch["x"] @ p).mean())(state["p"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["p"], value=value)
        return {"p": state["p"] - updates, "opt_state": opt_state}, {}

    p = jnp.ones((4, 2))
    captured = jf.capture(step, example=({"p": p, "opt_state": tx.init(p)}, batch()))
    assert [v.name for v in captured.program.of_kind(Kind.PARAM)] == ["p"]


def test_a_step_may_update_several_times() -> None:
    tx = wrapped()

    def step(state: State, batch: Batch) -> Any:
        params, opt_state = state["params"], state["opt_state"]
        for _ in range(2):
            grads = jax.grad(lambda p: jnp.square(batch["x"] @ p["w"]).mean())(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}, {}

    state = {"params": {"w": jnp.ones((4, 2))}, "opt_state": tx.init({"w": jnp.ones((4, 2))})}
    program = jf.capture(step, example=(state, batch())).program
    pairs = [pair for op in program.root.ops for pair in op.role_var]
    assert pairs == [("params/w", "params/w@GRAD"), ("params/w", "params/w@GRAD~1")]
