"""Each gradient is matched with its parameter, whether or not the update takes parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from tests.capture.common import assert_same_as_the_step, gradients_of, params_of
from tests.shared_zoo import captured_zoo

BATCH = np.ones((4, 3), np.float32)


def with_gradients(*names: str) -> list[tuple[str, str]]:
    return [(name, f"{name}@GRAD") for name in names]


@pytest.mark.parametrize("gives_params", [True, False])
def test_parameters_are_found_whether_update_gets_them_or_not(gives_params: bool) -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.square(batch @ p["w"] + p["b"]).mean())(state["net"])
        given = state["net"] if gives_params else None
        updates, opt_state = tx.update(grads, state["opt"], given)
        return {"net": optax.apply_updates(state["net"], updates), "opt": opt_state}, {}

    net = {"b": jnp.zeros(2), "w": jnp.ones((3, 2))}
    program = jf.capture(step, example=({"net": net, "opt": tx.init(net)}, BATCH)).program
    assert sorted(gradients_of(program)) == with_gradients("net/b", "net/w")
    assert params_of(program) == ["net/b", "net/w"]


def test_a_parameter_is_found_through_a_cast() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        low = state.astype(jnp.bfloat16)
        grads = jax.grad(lambda w: jnp.square(batch @ w).mean())(low)
        updates: Any = tx.update(grads, tx.init(low), low)[0]
        return state + updates.astype(jnp.float32), {}

    program = jf.capture(step, example=(jnp.ones((3, 2)), BATCH)).program
    assert gradients_of(program) == with_gradients("state")


def test_one_gradient_may_be_given_for_two_parameters() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        grad = jax.grad(lambda w: jnp.square(batch @ w).mean())(state["left"] + state["right"])
        grads = {"left": grad, "right": grad}
        updates, _ = tx.update(grads, tx.init(grads), state)
        return optax.apply_updates(state, updates), {}

    state = {"left": jnp.ones((3, 2)), "right": jnp.ones((3, 2))}
    captured = assert_same_as_the_step(step, state, BATCH)
    assert gradients_of(captured.program) == with_gradients("left", "right")


def test_a_tied_parameter_has_one_gradient() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(batch @ w @ w.T).mean())(state)
        updates, _ = tx.update(grads, tx.init(grads), state)
        return state + updates, {}

    program = jf.capture(step, example=(jnp.ones((3, 2)), BATCH)).program
    assert gradients_of(program) == with_gradients("state")


def test_two_optimizers_train_their_own_parameters() -> None:
    program = captured_zoo("gan").program
    trained = {name.split("/")[0] for name in params_of(program)}
    assert trained == {"judge", "make"}
    assert len(gradients_of(program)) == len(params_of(program))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["ema", "loss_scaling", "freeze", "nested_params", "nnx"])
def test_what_is_not_trained_is_no_parameter(name: str) -> None:
    program = captured_zoo(name).program
    params = params_of(program)
    assert {param for param, _ in gradients_of(program)} == set(params)
    assert params
    assert not [name for name in params if name.startswith(("ema", "opt"))]


@pytest.mark.grid
def test_gradients_of_two_hundred_parameters_find_each_its_own() -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))
    state = {f"w{i:03}": jnp.ones(3) for i in range(200)}
    params = {"params": state, "opt": jax.jit(tx.init)(state)}

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.stack([jnp.sum(jnp.square(batch * w)) for w in params.values()]).sum()

        grads = jax.grad(loss)(state["params"])
        updates, opt_state = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}, {}

    program = jf.capture(step, example=(params, BATCH)).program
    assert sorted(gradients_of(program)) == with_gradients(*(f"params/{name}" for name in state))


def test_a_gradient_that_depends_on_no_parameter_finds_the_only_one_of_its_path() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: (batch @ w).mean())(state)
        return state + tx.update(grads, tx.init(state))[0], {}

    program = jf.capture(step, example=(jnp.ones(3), BATCH)).program
    assert gradients_of(program) == with_gradients("state")
