"""Random numbers are those of one device, on any number of devices."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxfleet as jf
from tests.runtime.comparing import distributed
from tests.runtime.toys import FEATURES, State, rows, start, training

Draw = Callable[[jax.Array, jax.Array], jax.Array]


def flax_dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    """Returns Flax's mask over ones."""
    dropped = nn.Dropout(0.5, deterministic=False)
    return jnp.asarray(dropped.apply({}, jnp.ones_like(x), rngs={"dropout": key}))


def key_a_row(key: jax.Array, x: jax.Array) -> jax.Array:
    keys = jax.random.split(key, x.shape[0])
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (FEATURES,)))(keys)


DRAWS: dict[str, Draw] = {
    "bernoulli": lambda key, x: jax.random.bernoulli(key, 0.3, x.shape),
    "uniform": lambda key, x: jax.random.uniform(key, x.shape),
    "normal": lambda key, x: jax.random.normal(key, (x.shape[0], 3, 5)),
    "integers": lambda key, x: jax.random.randint(key, x.shape, 0, 1000),
    "bfloat16": lambda key, x: jax.random.normal(key, x.shape, jnp.bfloat16),
    "bits of 8": lambda key, x: jax.random.bits(key, x.shape, jnp.uint8),
    "flax": flax_dropout,
    "key a row": key_a_row,
    "batch second": lambda key, x: jax.random.uniform(key, (4, x.shape[0])).T,
    "gumbel": lambda key, x: jax.random.gumbel(key, x.shape),
    "categorical": jax.random.categorical,
}


def masked_step(tx: optax.GradientTransformation, draws: Mapping[str, Draw]) -> Any:
    """Returns a step that returns its random numbers, row by row."""
    train_step = training(tx)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        key, now = jax.random.split(state["key"])
        masks = {name: draw(now, batch["x"]) for name, draw in draws.items()}
        scales = [jnp.cos(mask.reshape(len(mask), -1).mean(axis=1)) for mask in masks.values()]
        scaled = {"x": batch["x"], "y": batch["y"] * sum(scales)}
        state, metrics = train_step({**state, "key": key}, scaled)
        return state, {**metrics, "masks": masks}

    return step


def fresh(tx: optax.GradientTransformation) -> State:
    return {**start(tx), "key": jax.random.key(11)}


def assert_same_draws(draws: Mapping[str, Draw], *, devices: int, sizes: tuple[int, ...]) -> None:
    """Fails unless a step on devices draws bit by bit the same as the plain one."""
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    train_step = masked_step(tx, draws)
    strategy = jf.DistributedStrategy(devices=devices)
    step = jf.distribute(train_step, (fresh(tx), rows(sizes[0])), strategy)
    state, wanted = fresh(tx), fresh(tx)
    for count in sizes:
        state, found = step(state, rows(count))
        wanted, metrics = jax.jit(train_step)(wanted, rows(count))
        for name, mask in metrics["masks"].items():
            assert found["masks"][name].dtype == mask.dtype, name
            np.testing.assert_array_equal(found["masks"][name], mask, err_msg=name)


@pytest.mark.grid
def test_what_is_drawn_is_bitwise_the_same() -> None:
    assert_same_draws(DRAWS, devices=4, sizes=(16, 16))


@pytest.mark.grid
@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_alone_is_bitwise_the_same(name: str) -> None:
    assert_same_draws({name: DRAWS[name]}, devices=4, sizes=(16, 16))


@pytest.mark.parametrize(
    "devices", [2, *(pytest.param(count, marks=pytest.mark.grid) for count in (1, 8))]
)
def test_dropout_is_the_same_whatever_the_number_of_devices_and_rows(devices: int) -> None:
    assert_same_draws({"flax": flax_dropout}, devices=devices, sizes=(16, 24))


def test_a_generator_that_cannot_draw_rows_draws_other_numbers_and_says_so() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    draws = {"uniform": DRAWS["uniform"]}
    state = {**start(tx), "key": jax.random.key(11, impl="rbg")}
    strategy = jf.DistributedStrategy(devices=4)
    step = jf.distribute(masked_step(tx, draws), (state, rows(16)), strategy)
    state, metrics = step(state, rows(16))
    mask = np.asarray(metrics["masks"]["uniform"]).reshape(4, -1)
    assert len({part.tobytes() for part in mask}) == 4  # no two devices draw the same
    assert "draws from a key per device" in step.explain()


@pytest.mark.grid
def test_the_zoos_entry_with_such_a_generator_trains() -> None:
    losses = [
        float(metrics["loss"])
        for _, metrics in distributed("rbg", 20, jf.DistributedStrategy(devices=4))
    ]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
