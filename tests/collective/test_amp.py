"""Products in half precision, and a loss scale that overflows change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from jaxfleet.ir import parse
from jaxfleet.passes import SkipOverflow
from tests.collective.models import (
    OPTIMIZERS,
    STEPS,
    State,
    assert_close,
    batch,
    distributed,
    start,
)

# A sum that differs by one ULP may round to the neighbouring bfloat16, 4e-3 away, of one of some
# eight values that a product sums; a few such differ after 20 steps.
ROUNDED = 4e-3


def product(dtype: Any) -> Callable[[Any, Any, Any], Any]:
    """Returns a product of rounded values, whose backward is scaled by its third argument."""

    def half(x: Any, y: Any) -> Any:
        return jnp.dot(x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)

    @jax.custom_vjp
    def dot(x: Any, y: Any, scale: Any) -> Any:
        del scale
        return half(x, y)

    def backward(kept: Any, g: Any) -> Any:
        x, y, scale = kept
        return half(g * scale, y.T) / scale, half(x.T, g * scale) / scale, None

    dot.defvjp(lambda x, y, s: (half(x, y), (x, y, s)), backward)
    return dot


class Oracle:
    """Mixed precision with a dynamic scale as in the papers, on one device."""

    def __init__(self, tx: Any, dtype: Any, scale: float, every: int) -> None:
        self.tx, self.scale, self.every, self.good, self.skipped = tx, scale, every, 0, 0
        self.state, dot = start(tx), product(dtype)

        def loss(params: Any, data: Any, scale: Any) -> Any:
            x, y = data
            h = jnp.tanh(dot(x, params["w1"], scale) + params["b1"])
            return jnp.mean(jnp.square(dot(h, params["w2"], scale) - y))

        self.grad = jax.jit(jax.value_and_grad(loss))

    def __call__(self, number: int) -> Any:
        value, grads = self.grad(self.state.params, batch(number), jnp.float32(self.scale))
        if not all(np.isfinite(g).all() for g in jax.tree.leaves(grads)):
            self.scale, self.good, self.skipped = max(1, self.scale / 2), 0, self.skipped + 1
            return value
        self.good += 1
        if self.good >= self.every:
            self.scale, self.good = self.scale * 2, 0
        updates, opt = self.tx.update(grads, self.state.opt, self.state.params)
        self.state = State(optax.apply_updates(self.state.params, updates), opt)  # type: ignore[arg-type]
        return value


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [("momentum", 1, {}), ("clipped", 2, {}), ("adam", 4, {"sharded": True})],
    ids=str,
)
def test_bfloat16_is_what_rounded_products_give(name: str, devices: int, options: Any) -> None:
    step, state = distributed(
        name, jf.DistributedStrategy(devices=devices, amp="bfloat16", **options)
    )
    oracle = Oracle(OPTIMIZERS[name](), jnp.bfloat16, 1.0, STEPS)
    for number in range(STEPS):
        state, metrics = step(state, batch(number))
        np.testing.assert_allclose(metrics["loss"], oracle(number), rtol=ROUNDED)
    assert_close(state, oracle.state, allowed=ROUNDED)
    assert "products in bfloat16: " in step.explain()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [("clipped", 1, {}), ("momentum", 2, {}), ("adam", 4, {"sharded": True})],
    ids=str,
)
def test_the_scale_falls_on_overflow_and_grows_again(name: str, devices: int, options: Any) -> None:
    scale, every = 2.0**22, 6
    strategy = jf.DistributedStrategy(
        devices=devices, amp="float16", loss_scale=scale, loss_scale_steps=every, **options
    )
    step, state = distributed(name, strategy)
    oracle = Oracle(OPTIMIZERS[name](), jnp.float16, scale, every)
    for number in range(STEPS):
        before, skipped = jax.tree.map(np.array, state), oracle.skipped
        oracle(number)
        state, _ = step(state, batch(number))
        if oracle.skipped > skipped:  # an overflowing step changes nothing
            jax.tree.map(np.testing.assert_array_equal, state, before)
        assert step.stats()["held"] == {"amp.scale": oracle.scale, "amp.good": oracle.good}
    assert 1 < oracle.skipped < STEPS / 2
    assert_close(state, oracle.state, allowed=ROUNDED)


def test_the_scale_is_saved_and_restored(tmp_path: Path) -> None:
    strategy = jf.DistributedStrategy(devices=2, amp="float16", loss_scale=2.0**24)
    step, state = distributed("sgd", strategy)
    for number in range(3):
        state, _ = step(state, batch(number))
    step.save(tmp_path / "amp", state)
    again, _ = distributed("sgd", strategy)
    again.restore(tmp_path / "amp")
    held = step.stats()["held"]
    assert again.stats()["held"] == held
    assert held["amp.scale"] < 2.0**24


@pytest.mark.grid
def test_merged_calls_that_overflow_are_left_out_together() -> None:
    strategy = jf.DistributedStrategy(devices=2, amp="float16", loss_scale=2.0**24, merge=2)
    step, state = distributed("adam", strategy)
    first = jax.tree.map(np.array, state)
    for number in range(2):
        state, _ = step(state, batch(number))
    jax.tree.map(np.testing.assert_array_equal, state, first)
    assert step.stats()["held"]["amp.scale"] == 2.0**23
    for number in range(2, 24):
        state, _ = step(state, batch(number))
    assert not np.array_equal(state.params["w1"], first.params["w1"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_amp_is_of_some_modes_and_dtypes() -> None:
    with pytest.raises(StrategyError, match="amp is 'int8'"):
        jf.DistributedStrategy(amp="int8")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="amp='float16' in mode 'pserver'"):
        jf.DistributedStrategy(amp="float16", mode="pserver")
    with pytest.raises(StrategyError, match="loss_scale is 0"):
        jf.DistributedStrategy(amp="float16", loss_scale=0)


def test_ranks_hold_state_back_in_one_order() -> None:
    names = [f"s{number}" for number in range(8)]
    declared = "\n".join(f"          state {name}: f32[]" for name in names)
    several = ", ".join(names)
    program = parse(f"""
        program p {{beside=[["amp.scale", 8.0]]}}
          param w: f32[4]
          data  x: f32[4]
          state amp.scale: f32[]
{declared}
          block 0
            backward
              w@GRAD: f32[4] = jax.neg(x) for (w, w@GRAD)
            optimize
              {several} = c_allreduce_sum({several})
    """)
    chosen = [op.writes[0] for op in SkipOverflow().run(program).root.ops if op.type.endswith("_n")]
    assert [name for name in chosen if name in names] == names  # a set's order: one in 40,000


@pytest.mark.parametrize("devices", [1, 2])
def test_bfloat16_runs_on_cpus_for_batches_of_sequences(devices: int) -> None:
    """XLA for CPUs has no product of two bfloat16 arrays with a transposed result."""
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def rounded(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    def loss(w: jax.Array, batch: Any, through: Any) -> jax.Array:
        hidden = through(batch["x"]) @ through(w)
        return jnp.square(jnp.tanh(hidden)).mean()

    def train(state: Any, batch: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(state["w"], batch, lambda x: x)
        updates, opt = tx.update(grad, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value

    w = jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)
    data = {"x": np.random.default_rng(0).normal(size=(8, 5, 6)).astype(np.float32)}
    state = {"w": w, "opt": tx.init(w)}
    strategy = jf.DistributedStrategy(devices=devices, amp="bfloat16", donate=False)
    step: Any = jf.distribute(train, (state, data), strategy)
    after, value = step(state, data)
    np.testing.assert_allclose(value, loss(w, data, rounded), rtol=1e-6)
    assert abs(float(value) - float(loss(w, data, lambda x: x))) > 1e-6
    exact: Any = train(state, data)[0]
    np.testing.assert_allclose(after["w"], exact["w"], atol=1e-3)
    assert not np.array_equal(after["w"], exact["w"])
