"""Models with a budget of 0.6: it is met, or rejected with the smallest feasible one.

Two of ten by default, one of which clips: `tests/analysis/memory` tests plans for the shapes of a
program without compiling.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.runtime.budgets import outcome
from tests.zoo import Built, Case, Wrap
from tests.zoo.base import case, plain_program

WIDTH, LAYERS = 16, 6
Layer = Callable[[Any, Any], Any]


def _normalized(h: Any) -> Any:
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-3)


def _attended(p: Any, h: Any) -> Any:
    rows = h.reshape(-1, 4, WIDTH)
    weights = jax.nn.softmax(rows @ p["w"] @ rows.swapaxes(1, 2) / WIDTH)
    return h + (weights @ (rows @ p["v"])).reshape(h.shape)


def _convolved(p: Any, h: Any) -> Any:
    signal = jax.lax.conv_general_dilated(h[:, None, :], p["k"], (1,), "SAME")
    return h + jnp.tanh(signal[:, 0, :])


MODELS: dict[str, Layer] = {
    "gelu": lambda p, h: h + jax.nn.gelu(h @ p["w"]),
    "plain tanh": lambda p, h: jnp.tanh(h @ p["w"]),
    "relu": lambda p, h: h + jax.nn.relu(h @ p["w"]),
    "two matrices": lambda p, h: h + jnp.tanh(h @ p["w"]) @ p["v"],
    "gated": lambda p, h: h + (h @ p["w"]) * jax.nn.sigmoid(h @ p["v"]),
    "normalized": lambda p, h: h + jnp.sin(_normalized(h) @ p["w"]),
    "two ways": lambda p, h: jnp.tanh(h @ p["w"]) + jnp.sin(h @ p["v"]),
    "softmax": lambda p, h: h + jax.nn.softmax(h @ p["w"]) @ p["v"],
    "attention": _attended,
    "convolution": _convolved,
}


def model(name: str, *, clips: bool) -> Case:
    """Returns a stack of equal layers, optionally with a global norm before its updates."""

    def build(wrap: Wrap) -> Built:
        rng = np.random.default_rng(0)

        def drawn(*shape: int) -> Any:
            return (rng.standard_normal(shape) * WIDTH**-0.5).astype(np.float32)

        params = [
            {"w": drawn(WIDTH, WIDTH), "v": drawn(WIDTH, WIDTH), "k": drawn(1, 1, 3)}
            for _ in range(LAYERS)
        ]

        def loss(params: Any, batch: Any) -> Any:
            h = batch["x"]
            for p in params:
                h = MODELS[name](p, h)
            return jnp.mean((h - batch["y"]) ** 2), {}

        def batch(step: int, rows: int) -> Any:
            rng = np.random.default_rng(step)
            return {x: rng.standard_normal((rows, WIDTH)).astype(np.float32) for x in "xy"}

        norm = optax.clip_by_global_norm(1.0) if clips else optax.identity()
        tx = wrap(optax.chain(norm, optax.sgd(0.1, momentum=0.9)))
        return plain_program(tx, params, loss, batch)

    return case(name, build)


@pytest.mark.grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_is_met_or_refused_with_the_least_that_is_met(name: str) -> None:
    found = outcome(model(name, clips=list(MODELS).index(name) % 2 == 1), 0.6)
    assert found.after < found.before
    if found.refused:
        assert 0.9 * found.asked <= found.after <= found.asked  # the named budget is the smallest
