"""Mistakes of steps written for pmap, and of states and optimizers of older versions."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, FeedError, StrategyError
from tests.mistakes.common import Batch, State, batch, loss, params, refused, training, wrapped


def test_a_step_that_pmap_divides() -> None:
    step, state = training(wrapped())

    def train_step(state: State, batch: Batch) -> Any:
        return step(state, batch)

    with refused(
        CaptureError,
        cause="the step is divided over devices by hand, by jax.pmap",
        line="def train_step(",
        hint="pass it without pmap",
    ):
        jf.capture(jax.pmap(train_step, axis_name="batch"), example=(state, batch()))


def test_a_replicated_state_of_a_step_that_pmap_divides() -> None:
    step, state = training(wrapped())

    def train_step(state: State, batch: Batch) -> Any:
        return step(state, batch)

    copies = jax.tree.map(lambda x: jnp.stack([x] * 4), (state, batch()))
    with refused(
        CaptureError,
        cause="the step is divided over devices by hand",
        line="def train_step(",
        hint="pass it without pmap",
    ):
        jf.capture(jax.pmap(train_step), example=copies)


def test_a_step_that_shard_map_divides() -> None:
    step, state = training(wrapped())
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    specs = (jax.P(), jax.P("data"))
    divided = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
    with refused(
        CaptureError,
        cause="the step is divided over devices by hand",
        line="def step(",
        hint="distribute divides the batch by itself",
    ):
        jf.capture(jax.jit(divided), example=(state, batch()))


def test_a_normalization_with_the_axis_of_a_pmap_is_named() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.BatchNorm(use_running_average=False, axis_name="batch")(x)

    def step(state: State, batch: Batch) -> Any:
        found, _ = Model().apply(state, batch["x"], mutable=["batch_stats"])
        return state, {"mean": found.mean()}

    zeros, ones = jnp.zeros(4), jnp.ones(4)
    norms = {"BatchNorm_0": {"scale": ones, "bias": zeros}}
    statistics = {"BatchNorm_0": {"mean": zeros, "var": ones}}
    with refused(
        CaptureError,
        cause="unbound axis name: batch",
        line="nn.BatchNorm(",
        hint="leave axis_name='batch' out of BatchNorm",
    ):
        jf.capture(step, example=({"params": norms, "batch_stats": statistics}, batch()))


def test_a_forgotten_example_is_named_without_printing_the_batch() -> None:
    step, state = training(wrapped())
    with pytest.raises(StrategyError, match=r"^strategy: a dict is not a strategy") as caught:
        jf.distribute(step, state, batch())  # type: ignore[call-overload]  # the mistake
    assert "example=(state, batch)" in "".join(caught.value.__notes__)


def test_a_key_made_of_integers_in_the_batch() -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause="'batch/rng' has 2",
        line="jf.capture(",
        hint="'batch/rng' looks like a random key made by jax.random.PRNGKey: a typed one",
    ):
        jf.capture(step, example=(state, {**batch(), "rng": jax.random.PRNGKey(0)}))


def test_a_typed_key_in_the_batch_goes_whole_to_every_device() -> None:
    step, state = training(wrapped())

    def drawing(state: State, batch: Batch) -> Any:
        keep = jax.random.bernoulli(batch["rng"], 0.5, batch["x"].shape)
        return step(state, {"x": batch["x"] * keep, "y": batch["y"]})

    keyed = {**batch(), "rng": jax.random.key(3)}
    _, expected = drawing(state, keyed)
    strategy = jf.DistributedStrategy(devices=4, donate=False)
    _, found = jf.distribute(drawing, (state, keyed), strategy)(state, keyed)
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)


def test_parameters_of_an_older_state_that_were_kept_by_reference() -> None:
    step, state = training(jf.distributed_optimizer(optax.adam(0.1)))
    made = jf.distribute(step, (state, batch()), jf.DistributedStrategy(devices=4))
    state, _ = made(state, batch())
    best = state["params"]
    state, _ = made(state, batch())
    with refused(
        FeedError,
        cause="'params/b' is of an older state: a step since then took its memory",
        line='made({**state, "params": best}',
        hint="best = jax.tree.map(jnp.copy, state.params)",
    ):
        made({**state, "params": best}, batch())


def test_a_step_that_jit_traced_before_its_optimizer_was_wrapped() -> None:
    tx: Any = optax.sgd(0.1)

    @jax.jit
    def step(state: State, batch: Batch) -> Any:
        grads = jax.grad(loss)(state, batch)
        updates, _ = tx.update(grads, tx.init(state), state)
        return optax.apply_updates(state, updates), {}

    step(params(), batch())
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    with refused(
        CaptureError,
        cause="the step was traced before its optimizer was wrapped: jax.jit keeps that trace",
        line="@jax.jit",
        hint="before the step is called for the first time",
    ):
        jf.capture(step, example=(params(), batch()))
