"""Cutting a step and recomputing forward preserves its results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.runtime.memory_report import TrainerMemory
from tests.runtime.comparing import assert_close, distributed, on_one_device, tolerance
from tests.zoo import ZOO, Case

STEPS = 3
# Random bits, loops, branches, several optimizers, joint updates; state in forward is below.
NAMES = ("scan_over_time", "dropout", "multisteps", "gan", "while_loop")
MORE = (
    *("cnn_batchnorm", "transformer", "remat_names", "row_keys", "clipping", "loss_scaling"),
    *("mixed_precision", "ema"),
)


def entries() -> list[object]:
    more = [pytest.param(ZOO[name], id=name, marks=pytest.mark.grid) for name in MORE]
    return [*(pytest.param(ZOO[name], id=name) for name in NAMES), *more]


@pytest.mark.grid
@pytest.mark.parametrize("entry", entries())
def test_one_device_computes_the_same(entry: Case) -> None:
    wanted = on_one_device(entry.name, STEPS)
    strategy = jf.DistributedStrategy(mode="single", passes="recompute")
    for number, result in enumerate(distributed(entry.name, STEPS, strategy)):
        # Other executables fuse other operators: sums and products differ in the last digits.
        assert_close(result, wanted[number], 4 * tolerance(entry), f"after step {number}")


@pytest.mark.grid
@pytest.mark.parametrize("name", ["cnn_batchnorm", "dropout"])
def test_four_devices_compute_the_same(name: str) -> None:
    wanted = on_one_device(name, STEPS)
    strategy = jf.DistributedStrategy(devices=4, passes="recompute")
    for number, result in enumerate(distributed(name, STEPS, strategy)):
        assert_close(result, wanted[number], 4 * tolerance(ZOO[name]), f"after step {number}")


@pytest.mark.grid
def test_a_batch_of_another_size_runs_the_same_parts() -> None:
    built = ZOO["mlp"].build(jf.distributed_optimizer)
    example = (built.state, built.batch(0, 16))
    plain = jf.distribute(built.train_step, example, "single")
    cut = jf.distribute(
        built.train_step, example, jf.DistributedStrategy(mode="single", passes="recompute")
    )
    batch = built.batch(0, 24)
    _, wanted = plain(ZOO["mlp"].build(jf.distributed_optimizer).state, batch)
    _, found = cut(ZOO["mlp"].build(jf.distributed_optimizer).state, batch)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)


def telling() -> tuple[Any, Any]:
    """Returns a step with gradients and updates as metrics, and its example."""
    tx: Any = jf.distributed_optimizer(optax.sgd(0.1, momentum=0.9))

    def loss_of(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for w in params:
            h = h + jnp.tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    def train_step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        new: Any = optax.apply_updates(params, updates)
        told = {"loss": loss, "gradient": grads[0], "new": new[0], "state": (new, opt_state)}
        return (new, opt_state), told

    rng = np.random.default_rng(0)
    params = [0.3 * rng.standard_normal((8, 8)).astype(np.float32) for _ in range(6)]
    batch = {name: rng.standard_normal((16, 8)).astype(np.float32) for name in "xy"}
    return train_step, ((params, tx.init(params)), batch)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("", "memory_optimize{level=1},release_memory"),
        ("recompute", "memory_optimize{level=1},release_memory{at_cuts=true}"),
    ],
)
@pytest.mark.parametrize("mode", ["single", "collective", "pserver"])
def test_names_that_are_shared_and_released_change_no_result(
    mode: Any, before: str, behind: str
) -> None:
    train_step, (state, batch) = telling()
    found, taken = list[Any](), list[Any]()
    for passes in (before, f"{before},{behind}".lstrip(",")):
        devices = 2 if mode == "collective" else None
        strategy = jf.DistributedStrategy(mode=mode, passes=passes, devices=devices)
        if mode == "pserver":
            twin = jf.Twin(train_step, (state, batch), strategy)
            result = twin.run(state, [batch, batch])
            job = twin.programs()
            memory = TrainerMemory(job.trainer, jax.devices()[0], 8, twin.cache)
            found.append((job.trainer, (result.states, result.metrics)))
            taken.append((memory.peak().bytes, memory.executables))
            continue
        step = jf.distribute(train_step, (state, batch), strategy)
        after, _ = step(jax.tree.map(jnp.array, state), batch)
        found.append((step.program, step(after, batch)))
        assert isinstance(step, jf.Step)
        report = step.memory_report()
        taken.append((report.after_bytes, report.executables))
    assert any("instead_of" in op.attrs for op in found[1][0].root.ops)
    for x, y in zip(*(jax.tree.leaves(values) for _, values in found), strict=True):
        np.testing.assert_array_equal(x, y)
    assert taken[0] == taken[1]  # a name with two values would have one place for both


@pytest.mark.grid
def test_metrics_of_gradients_and_of_new_state_are_what_they_are_uncut() -> None:
    train_step, (state, batch) = telling()
    strategy = jf.DistributedStrategy(mode="single", passes="recompute")
    cut = jf.distribute(train_step, (state, batch), strategy)
    again = [x for op in cut.program.root.ops for x in op.writes if x.endswith("@RECOMPUTE")]
    assert len(again) >= 3  # fetching a gradient does not make backward a part of forward
    plain = jf.distribute(train_step, (state, batch), "single")
    wanted, found = (step(jax.tree.map(jnp.array, state), batch)[1] for step in (plain, cut))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # other executables, other sums
    twins = [
        jf.Twin(train_step, (state, batch), jf.DistributedStrategy(mode="pserver", passes=passes))
        for passes in ("", "recompute")
    ]
    wanted, found = (twin.run(state, [batch, batch]).metrics for twin in twins)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
