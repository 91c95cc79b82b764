"""A BatchNorm left in evaluation mode is named when a step is distributed."""

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxfleet as jf

X = jnp.arange(24.0).reshape(8, 3)
TX = jf.distributed_optimizer(optax.sgd(0.1))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool) -> Any:
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x)).sum(-1)


class Nnx(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.dense(x)).sum(-1)


def linen_step(*, train: bool) -> tuple[Any, Any]:
    model = Linen()
    variables = model.init(jax.random.key(0), X, train=False)

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            given = {"params": params, "batch_stats": state["batch_stats"]}
            out, new = model.apply(given, batch, train=train, mutable=["batch_stats"])
            return jnp.mean((out - 1) ** 2), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "batch_stats": stats}, loss

    return train_step, {**variables, "opt": TX.init(variables["params"])}


def nnx_step() -> tuple[Any, Any]:
    model = Nnx()
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            model = nnx.merge(graph, params, state["rest"])
            return jnp.mean((model(batch) - 1) ** 2), nnx.state(model, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "rest": rest}, loss

    return train_step, {"params": params, "opt": TX.init(params), "rest": rest}


def test_linen_statistics_that_a_step_never_updates_are_named() -> None:
    step, state = linen_step(train=False)
    wanted = r"'batch_stats/BatchNorm_0/mean' and .* are read .* and never updated"
    with pytest.warns(UserWarning, match=wanted):
        jf.distribute(step, (state, X), jf.DistributedStrategy(devices=2))


def test_nnx_statistics_that_a_step_never_updates_are_named() -> None:
    step, state = nnx_step()
    with pytest.warns(UserWarning, match="'rest/norm/mean' and .* never updated"):
        jf.distribute(step, (state, X), "single")


def test_statistics_that_train_are_not_warned_of() -> None:
    step, state = linen_step(train=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jf.distribute(step, (state, X), jf.DistributedStrategy(devices=2))


def test_a_scaler_of_features_is_not_warned_of() -> None:
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        scaler = state["scaler"]
        x = (batch - scaler["mean"]) / jnp.sqrt(scaler["var"])
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        updates, opt = TX.update(grads, state["opt"], state["w"])
        return {**state, "w": optax.apply_updates(state["w"], updates), "opt": opt}, loss

    w = jnp.ones(3)
    scaler = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jf.distribute(train_step, ({"w": w, "opt": TX.init(w), "scaler": scaler}, X), "single")
