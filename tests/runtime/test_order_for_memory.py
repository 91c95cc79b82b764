"""Reordering and cutting a step's operators preserves its results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.capture import capture
from jaxfleet.passes import OrderForMemory
from tests.runtime.comparing import (
    assert_close,
    assert_equal,
    distributed,
    on_one_device,
    tolerance,
)
from tests.zoo import ZOO

STEPS = 2
ORDERED = "order_for_memory{rows=16}"
NAMES = ("ema", "gan", "covariance", "row_gradients")  # programs with large changes of order
ROWS, WIDTH, LAYERS, MICROBATCHES = 1024, 32, 2, 4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_another_order_computes_the_same_bits(name: str) -> None:
    wanted = on_one_device(name, STEPS)
    strategy = jf.DistributedStrategy(mode="single", passes=ORDERED)
    for number, result in enumerate(distributed(name, STEPS, strategy)):
        assert_equal(result, wanted[number], f"after step {number}")
    built = ZOO[name].build(jf.distributed_optimizer)
    program = capture(built.train_step, example=(built.state, built.batch(0, 16))).program
    assert OrderForMemory(rows=16).run(program) != program


@pytest.mark.grid
@pytest.mark.parametrize("name", ["gan", "clipping"])
def test_executables_of_their_own_compute_the_same(name: str) -> None:
    wanted = on_one_device(name, STEPS)
    strategy = jf.DistributedStrategy(mode="single", passes=f"{ORDERED},cut_apart{{rows=16}}")
    for number, result in enumerate(distributed(name, STEPS, strategy)):
        # Other executables fuse other operators: sums and products differ in the last digits.
        assert_close(result, wanted[number], tolerance(ZOO[name]), f"after step {number}")


def microbatches() -> tuple[Any, Any]:
    optimizer = jf.distributed_optimizer(optax.sgd(0.1))
    params = [
        0.1 * jax.random.normal(key, (WIDTH, WIDTH))
        for key in jax.random.split(jax.random.key(0), LAYERS)
    ]

    def loss_of(params: Any, x: Any) -> Any:
        h = x
        for w in params:
            h = h + jax.nn.gelu(h @ w)
        return jnp.mean((h - 1.0) ** 2)

    def train_step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        rows = batch.shape[0] // MICROBATCHES
        parts = [batch[n * rows : (n + 1) * rows] for n in range(MICROBATCHES)]
        grads = [jax.grad(loss_of)(params, part) for part in parts]
        total = jax.tree.map(lambda *all_: sum(all_), *grads)
        updates, opt_state = optimizer.update(total, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    state = (params, optimizer.init(params))
    batch = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    return train_step, (state, batch)


@pytest.mark.grid
def test_microbatches_take_the_memory_of_one_and_nothing_runs_again() -> None:
    step_of, (state, batch) = microbatches()
    plain: Any = jf.distribute(step_of, (state, batch), "single")
    strategy = jf.DistributedStrategy(mode="single", memory_budget=0.6)
    fitted: Any = jf.distribute(step_of, (state, batch), strategy)
    report = fitted.memory_report()
    assert report.after_bytes <= 0.6 * report.before_bytes
    assert "in another order; nothing is computed again" in str(report)
    assert report.after.peak < report.before.peak
    before = sorted(op.type for op in plain.program.root.ops)
    assert before == sorted(op.type for op in fitted.program.root.ops if op.type != "cut")
    copied = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
    wanted, _ = plain(state, batch)
    found, _ = fitted(copied, batch)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)  # other executables, as above
