"""Mistakes with the optimizer: unwrapped, partly wrapped, wrapped twice, in a loop."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError
from tests.mistakes.common import Batch, State, batch, loss, params, refused, training, wrapped

OUTERMOST = "wrap the outermost"


def test_an_optimizer_that_is_not_wrapped() -> None:
    step, state = training(optax.sgd(0.1))
    with refused(
        CaptureError,
        cause="'params/b' is trained, but no optimizer is wrapped",
        line="optax.apply_updates(",
        hint="tx = jf.distributed_optimizer(",
    ):
        jf.capture(step, example=(state, batch()))


def linear(weights: Any, batch: Batch) -> jax.Array:
    return jnp.mean(batch["x"] @ weights["w"] + weights["b"])


@pytest.mark.parametrize("returns_loss", [True, False])
@pytest.mark.parametrize("cast", [lambda x: x, lambda x: x.astype(jnp.bfloat16)])
def test_an_optimizer_of_a_linear_loss_that_is_not_wrapped(cast: Any, returns_loss: bool) -> None:
    """Its gradients do not depend on the parameters, which look like statistics of gradients."""
    tx = optax.adam(0.1)

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(lambda p: linear(jax.tree.map(cast, p), batch))(
            state["params"]
        )
        updates, opt = tx.update(grads, state["opt_state"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt}
        return new, value if returns_loss else {}

    state = {"params": params(), "opt_state": tx.init(params())}
    with refused(
        CaptureError,
        cause="'params/b' is trained, but no optimizer is wrapped",
        line="optax.apply_updates(",
        hint="tx = jf.distributed_optimizer(",
    ):
        jf.capture(step, example=(state, batch()))


def test_a_linear_part_whose_optimizer_is_not_wrapped() -> None:
    tx, bare = wrapped(), optax.sgd(0.1)

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        weights = state["params"]
        grads = jax.grad(lambda p: linear(p, batch) + jnp.sum(p["w"] ** 2))(weights)
        updates, opt = tx.update(grads["w"], state["opt_state"], weights["w"])
        moved, _ = bare.update(grads["b"], bare.init(weights["b"]))
        new = {"w": optax.apply_updates(weights["w"], updates), "b": weights["b"] + moved}
        return {"params": new, "opt_state": opt}, {}

    state = {"params": params(), "opt_state": tx.init(params()["w"])}
    with refused(
        CaptureError,
        cause="the gradient of 'params/b' does not pass through distributed_optimizer",
        line='weights["b"] + moved',
        hint=OUTERMOST,
    ):
        jf.capture(step, example=(state, batch()))


def test_statistics_of_gradients_need_no_optimizer() -> None:
    """Also those with the shape of a parameter, as long as no loss depends on them."""

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        grads = jax.grad(linear)(state["params"], batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        return {**state, "mean": mean}, {"largest": jnp.max(state["mean"]["w"])}

    jf.capture(step, example=({"params": params(), "mean": params()}, batch()))


@pytest.mark.parametrize(
    "tx",
    [
        jf.distributed_optimizer(wrapped()),
        jf.distributed_optimizer(optax.chain(optax.clip(1.0), wrapped())),
    ],
    ids=["twice", "around a chain that holds a wrapped one"],
)
def test_an_optimizer_that_is_wrapped_inside_another(tx: Any) -> None:
    step, state = training(tx)
    with refused(
        CaptureError,
        cause="a distributed_optimizer updates inside another one",
        line="tx.update(grads",
        hint=OUTERMOST,
    ):
        jf.capture(step, example=(state, batch()))


def test_a_mask_around_the_wrapped_optimizer() -> None:
    step, state = training(optax.masked(wrapped(), {"b": False, "w": True}))
    with refused(
        CaptureError,
        cause="the gradient of 'params/b' does not pass through distributed_optimizer",
        line="optax.apply_updates(",
        hint=OUTERMOST,
    ):
        jf.capture(step, example=(state, batch()))


def test_one_part_of_a_multi_transform_that_is_not_wrapped() -> None:
    parts: dict[Any, Any] = {"yes": wrapped(), "no": optax.sgd(0.1)}
    step, state = training(optax.multi_transform(parts, {"b": "no", "w": "yes"}))
    with refused(
        CaptureError,
        cause="the gradient of 'params/b' does not pass through distributed_optimizer",
        line="optax.apply_updates(",
        hint=OUTERMOST,
    ):
        jf.capture(step, example=(state, batch()))


def test_gradients_of_another_tree_than_the_parameters() -> None:
    tx = wrapped()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        grads = {"weights": jax.grad(loss)(state["params"], batch)["w"]}
        tx.update(grads, state["opt_state"], state["params"])
        return state, {}

    with refused(
        CaptureError,
        cause="the gradient 'weights' has no parameter of that name",
        line="tx.update(grads, state",
        hint="the parameters that update gets: b, w",
    ):
        jf.capture(step, example=({"params": params(), "opt_state": tx.init(params())}, batch()))


def test_a_gradient_of_another_shape_than_its_parameter() -> None:
    tx = wrapped()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        grads = jax.tree.map(jnp.sum, jax.grad(loss)(state["params"], batch))
        tx.update(grads, state["opt_state"], state["params"])
        return state, {}

    with refused(
        CaptureError,
        cause="the gradient of 'b' is [], but the parameter is [2]",
        line="tx.update(grads, state",
        hint="give update the gradients as they come",
    ):
        jf.capture(step, example=({"params": params(), "opt_state": tx.init(params())}, batch()))


def test_parameters_that_are_not_in_the_state() -> None:
    tx, outside = wrapped(), params()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        grads = jax.grad(loss)(outside, batch)
        _, opt_state = tx.update(grads, state["opt_state"], outside)
        return {"opt_state": opt_state}, {}

    with refused(
        CaptureError,
        cause="the gradient 'b', f32[2], comes with a parameter that is not a leaf of the state",
        line="tx.update(grads, state",
        hint="take the parameters from the state",
    ):
        jf.capture(step, example=({"opt_state": tx.init(params())}, batch()))


def test_a_gradient_with_respect_to_the_batch() -> None:
    tx = wrapped()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        grads = jax.grad(lambda x: loss(state["params"], {**batch, "x": x}))(batch["x"])
        _, opt_state = tx.update(grads, state["opt_state"])
        return {**state, "opt_state": opt_state}, {}

    with refused(
        CaptureError,
        cause="fits no leaf of the state",
        line="tx.update(grads, state",
        hint="keep the parameters in the state",
    ):
        jf.capture(
            step, example=({"params": params(), "opt_state": tx.init(batch()["x"])}, batch())
        )


def test_two_parameters_that_a_gradient_may_belong_to() -> None:
    tx = wrapped()

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        both = {"params": params(), "w": state["left"]["w"] * state["right"]["w"]}
        grads = jax.grad(lambda w: loss({**both["params"], "w": w}, batch))(both["w"])
        _, opt_state = tx.update({"w": grads}, state["opt_state"])
        return {**state, "opt_state": opt_state}, {}

    sides = {"left": {"w": params()["w"]}, "right": {"w": params()["w"]}}
    with refused(
        CaptureError,
        cause="the gradient 'w', f32[4,2], may belong to any of left/w, right/w",
        line='tx.update({"w": grads}',
        hint="pass the parameters too",
    ):
        jf.capture(step, example=({**sides, "opt_state": tx.init(sides["left"])}, batch()))


@pytest.mark.parametrize("thing", [0.1, optax.adam, optax.constant_schedule(0.1)])
def test_wrapping_what_is_not_an_optimizer(thing: Any) -> None:
    with refused(
        CaptureError,
        cause="is not an optimizer",
        line="jf.distributed_optimizer(thing)",
        hint="such as optax.adam(1e-3)",
    ):
        jf.distributed_optimizer(thing)
