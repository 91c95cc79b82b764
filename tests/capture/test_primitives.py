"""Unusual uses of jax are captured, and give the same results bit by bit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.capture.common import assert_same_as_the_step

BATCH = np.random.default_rng(0).normal(size=(6, 4, 4)).astype(np.float32)
WEIGHT = jnp.float32(1.5)


def definite(x: jax.Array) -> jax.Array:
    return x @ x.swapaxes(-1, -2) + 4 * jnp.eye(4)


def twice(x: jax.Array) -> jax.Array:
    return jnp.sin(jnp.sin(x))


FUNCTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "solve": lambda x: jnp.linalg.solve(definite(x), x),
    "maxpool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID"),
    "cumulative": lambda x: lax.cummax(jnp.cumprod(x, axis=1), axis=2),
    "map": lambda x: lax.map(jnp.sin, x),
    "sort": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "interp": lambda x: jnp.interp(x, jnp.array([-1.0, 0.0, 1.0]), jnp.array([0.0, 1.0, 4.0])),
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + i, x),
    "switch": lambda x: lax.switch((x[0, 0, 0] > 0) + 1, [jnp.sin, jnp.cos, twice], x),
    "vmapped cond": jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r)),
    "platform": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "scan reversed": lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x, reverse=True)[1],
    "checkpoint": jax.checkpoint(twice),
    "policy": jax.checkpoint(
        twice, policy=jax.checkpoint_policies.save_anything_except_these_names("a")
    ),
    "scatter": lambda x: x.at[:, 1].set(0.0).at[:, jnp.array([0, 2])].multiply(2.0),
    "scatter max": lambda x: x.at[:, jnp.array([1])].max(0.0).at[:, 2].min(1.0),
    "segments": lambda x: jax.ops.segment_sum(x[:, 0], jnp.arange(x.shape[0]) % 3, 3),
    "convolution": lambda x: lax.conv_general_dilated(
        x[:, None], jnp.ones((2, 1, 2, 2)), (1, 1), "SAME"
    ),
    "attention": lambda x: jax.nn.dot_product_attention(*[x[:, :, None]] * 3),
    "complex": lambda x: jnp.abs((x + 1j * x) ** 2),
    "low precision": lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) * 3,
    "random": lambda x: jax.random.truncated_normal(jax.random.key(0), -1, 1, x.shape) * x,
    "device_put": lambda x: jax.device_put(x) * 2,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_and_its_gradient(name: str) -> None:
    function = FUNCTIONS[name]

    def step(state: Any, batch: Any) -> Any:
        def loss(weight: jax.Array) -> tuple[jax.Array, Any]:
            value = function(batch * weight)
            return jnp.sum(jnp.square(value)).astype(jnp.float32), value

        (_, value), slope = jax.value_and_grad(loss, has_aux=True)(state)
        return state, {"value": value, "slope": slope}

    captured = assert_same_as_the_step(step, WEIGHT, BATCH)
    assert captured.rows is None


NO_GRADIENT: dict[str, Callable[[jax.Array], Any]] = {
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, twice(c[1])), (0, x)
    ),
    "search": lambda x: jnp.searchsorted(jnp.sort(x[0, 0]), x),
    "arguments": lambda x: (x.argmax(-1), jnp.unique(jnp.round(x[0]), size=4)),
    "bits": lambda x: (lax.bitcast_convert_type(x, jnp.int32), lax.population_count(x.astype(int))),
    "permutation": lambda x: jax.random.permutation(jax.random.key(0), x[0]),
    "reduce": lambda x: lax.reduce(x[0], 0.0, lambda a, b: a + jnp.abs(b), (1,)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NO_GRADIENT)
def test_a_function_without_a_gradient(name: str) -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, NO_GRADIENT[name](batch)

    assert assert_same_as_the_step(step, WEIGHT, BATCH).rows is None
