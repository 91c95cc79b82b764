"""`jf.verify` of steps that take other arguments than a state and a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxfleet as jf
from jaxfleet.errors import FeedError

TX = jf.distributed_optimizer(optax.sgd(0.1, momentum=0.9))
DRAWN = np.random.default_rng(0)
BATCHES = [
    (DRAWN.normal(size=(8, 4)).astype(np.float32), DRAWN.normal(size=8).astype(np.float32))
    for _ in range(3)
]
PARAMS = {"w": jnp.float32(DRAWN.normal(size=4)), "b": jnp.float32(0)}


def loss_of(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean(jnp.square(x @ params["w"] + params["b"] - y))


def four_arguments(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def with_a_key(state: Any, batch: Any, rng: Any) -> Any:
    x, y = batch
    params, opt_state = state
    kept = x * jax.random.bernoulli(rng, 0.5, x.shape)
    params, opt_state, loss = four_arguments(params, opt_state, kept, y)
    return (params, opt_state), loss


def in_place(model: nnx.Linear, optimizer: nnx.Optimizer[Any], x: Any, y: Any) -> Any:
    def loss(model: nnx.Linear) -> jax.Array:
        return jnp.mean(jnp.square(model(x)[:, 0] - y))

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


@pytest.fixture
def objects() -> tuple[nnx.Linear, nnx.Optimizer[Any]]:
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def test_a_step_of_several_arguments_is_verified() -> None:
    example = (PARAMS, TX.init(PARAMS), *BATCHES[0])
    found = jf.verify(four_arguments, example=example, batches=BATCHES)
    assert found.agrees
    assert found.steps == 3
    assert found.largest < 1e-6
    assert "params/w" in found.differences


def test_a_step_that_takes_a_key_is_verified_with_a_key_for_every_step() -> None:
    batches = [(batch, jax.random.key(n)) for n, batch in enumerate(BATCHES)]
    state = (PARAMS, TX.init(PARAMS))
    found = jf.verify(with_a_key, example=(state, *batches[0]), batches=batches, servers=1)
    assert found.agrees
    assert found.largest < 1e-6


def test_objects_that_change_in_place_are_verified_and_left_as_they_were(
    objects: tuple[nnx.Linear, nnx.Optimizer[Any]],
) -> None:
    before = np.asarray(objects[0].kernel[...])
    found = jf.verify(in_place, example=(*objects, *BATCHES[0]), batches=BATCHES)
    assert found.agrees
    assert found.largest < 1e-6
    np.testing.assert_array_equal(objects[0].kernel[...], before)


def test_a_batch_of_other_arguments_is_refused() -> None:
    example = (PARAMS, TX.init(PARAMS), *BATCHES[0])
    with pytest.raises(FeedError, match="batch 1 has 1 arguments instead of 2") as caught:
        jf.verify(four_arguments, example=example, batches=[BATCHES[0], BATCHES[1][:1]])
    assert "a tuple (x, y) for every step" in caught.value.__notes__[-1]


def test_a_state_and_an_example_exclude_each_other() -> None:
    both: dict[str, Any] = {"state": PARAMS, "example": (PARAMS, BATCHES[0])}
    for given in ({}, both):
        with pytest.raises(FeedError, match="needs either a state or an example"):
            jf.verify(four_arguments, batches=BATCHES, **given)
