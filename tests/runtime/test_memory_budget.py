"""A step with a memory budget: the same results in less memory, or an explained rejection."""

import logging
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from jaxfleet.lower import ExecutableCache
from jaxfleet.observability import Progress

ROWS, WIDTH, BLOCKS = 256, 64, 5


def blocks(
    tx: optax.GradientTransformation, *, dropout: bool = False, rows: int = ROWS
) -> tuple[Any, Any]:
    """Returns a step of equal blocks, with large residuals for backward, and its example."""
    optimizer = jf.distributed_optimizer(tx)
    keys = jax.random.split(jax.random.key(0), BLOCKS)
    params = [
        {"w": 0.1 * jax.random.normal(k, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)} for k in keys
    ]

    def train_step(state: Any, batch: Any) -> Any:
        params, opt_state, key = state

        def loss_of(params: Any) -> Any:
            h = batch["x"]
            for number, p in enumerate(params):
                new = jax.nn.gelu(h @ p["w"] + p["b"])
                if dropout:
                    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, new.shape)
                    new = jnp.where(kept, new / 0.8, 0.0)
                h = h + new
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        key = jax.random.split(key, 1)[0]
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss}

    state = (params, optimizer.init(params), jax.random.key(1))
    return train_step, (state, batch_of(rows))


def batch_of(rows: int) -> Any:
    rng = np.random.default_rng(rows)
    return {
        "x": rng.standard_normal((rows, WIDTH)).astype(np.float32),
        "y": rng.standard_normal((rows, WIDTH)).astype(np.float32),
    }


def fitted(built: tuple[Any, Any], budget: float, devices: int = 1) -> Any:
    strategy = jf.DistributedStrategy(devices=devices, memory_budget=budget)
    return jf.distribute(*built, strategy)


@pytest.mark.grid
def test_planning_that_takes_long_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxfleet.runtime.memory_fit.Progress", partial(Progress, quiet_s=0.0))
    with caplog.at_level(logging.INFO, "jaxfleet"):
        fitted(blocks(optax.sgd(0.1), rows=64), 0.7)
    assert "memory_budget of 'train_step': compiled as it is, it takes" in caplog.messages[0]
    assert "compiling plan 1 of at most 12" in caplog.messages[1]


@cache
def fitted_sgd(budget: float) -> Any:
    """Returns a step with plain SGD that fits a budget, shared by several tests."""
    return fitted(blocks(optax.sgd(0.1)), budget)


def trained(step: Any, state: Any, batches: list[Any]) -> list[np.ndarray]:
    losses = []
    state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    params, opt_state, key = state
    return [np.asarray(x) for x in (*jax.tree.leaves((params, opt_state)), *losses)] + [
        np.asarray(jax.random.key_data(key))
    ]


@pytest.mark.grid
@pytest.mark.parametrize("dropout", [False, True])
def test_a_fitted_step_computes_what_the_step_computes(dropout: bool) -> None:
    built = blocks(optax.adam(1e-2), dropout=dropout)
    batches = [batch_of(ROWS), batch_of(ROWS), batch_of(ROWS // 2)]
    wanted = trained(jf.distribute(*built, "single"), built[1][0], batches)
    found = trained(fitted(built, 0.6), built[1][0], batches)
    for x, y in zip(found, wanted, strict=True):
        # Executables of other operators sum in another order: some ULPs, which Adam magnifies
        # where a gradient is near zero.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.grid
def test_a_fitted_step_on_devices_computes_what_one_device_does() -> None:
    rows = 4 * ROWS
    built = blocks(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), rows=rows)
    batches = [batch_of(rows), batch_of(rows)]
    wanted = trained(jf.distribute(*built, "single"), built[1][0], batches)
    step = fitted(built, 0.6, devices=4)
    for x, y in zip(trained(step, built[1][0], batches), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)  # sums over four devices' rows
    report = step.memory_report()
    assert report.after_bytes <= 0.6 * report.before_bytes


@pytest.mark.grid
@pytest.mark.parametrize("budget", [0.9, 0.75, 0.6])
def test_the_budget_is_met_by_what_xla_says(budget: float) -> None:
    step = fitted_sgd(budget)
    report = step.memory_report()
    assert report.fit is not None
    assert report.fit.passes
    assert report.after_bytes <= report.fit.budget == int(budget * report.before_bytes)
    assert report.executables[0] > 1
    assert "recompute" in step.explain()
    assert "places into executables that run one after another" in step.explain()
    with pytest.raises(StrategyError, match="runs as several executables"):
        step.memory_analysis()


@pytest.mark.grid
def test_bytes_are_a_budget_too() -> None:
    whole = fitted_sgd(1.0).memory_report().after_bytes
    part = int(0.6 * whole)
    report = fitted_sgd(part).memory_report()
    assert report.after_bytes <= part < report.before_bytes == whole


def test_a_step_that_fits_stays_as_it_is() -> None:
    step = fitted_sgd(1.0)
    report = step.memory_report()
    assert report.after_bytes == report.before_bytes
    assert report.executables == (1, 1)
    assert not any(op.type == "cut" for op in step.program.root.ops)
    assert "as it is, the step meets it" in str(report)


@pytest.mark.grid
def test_what_cannot_be_met_is_refused_with_the_least_that_can() -> None:
    built = blocks(optax.sgd(0.1))
    with pytest.raises(StrategyError, match="cannot be made to take 1,000 bytes") as refused:
        fitted(built, 1000)
    (hint,) = (note for note in refused.value.__notes__ if "hint" in note)
    least = int(hint.split("take is ")[1].split(";")[0].replace(",", ""))
    assert fitted(built, least).memory_report().after_bytes <= least


def test_a_budget_of_one_byte_is_told_from_a_fraction() -> None:
    strategy = jf.DistributedStrategy(mode="single", passes="recompute", memory_budget=1)
    with pytest.raises(StrategyError, match="take 1 bytes") as refused:
        jf.distribute(*blocks(optax.sgd(0.1), rows=8), strategy)
    assert str(refused.value.hint).startswith("1 is one byte, and 1.0 a fraction: all that")


def test_what_passes_have_cut_is_not_planned_again() -> None:
    few: Any = np.int64(9)
    strategy = jf.DistributedStrategy(mode="single", passes="recompute", memory_budget=few)
    with pytest.raises(StrategyError, match=r"take 9 bytes: strategy.passes has cut it already"):
        jf.distribute(*blocks(optax.sgd(0.1), rows=8), strategy)


@pytest.mark.parametrize("budget", [True, "half", 0, -1, 1.5, 0.0, float("nan"), np.float32(2)])
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    with pytest.raises(StrategyError, match="memory_budget is"):
        jf.DistributedStrategy(memory_budget=budget)


@pytest.mark.grid
def test_the_report_names_what_is_alive_and_is_drawn(tmp_path: Path) -> None:
    step = fitted_sgd(0.6)
    report = step.memory_report()
    text = str(report)
    assert "budget" in text
    assert "test_memory_budget.py" in text
    for ending in ("png", "svg"):
        report.plot(tmp_path / f"curve.{ending}")
        assert (tmp_path / f"curve.{ending}").stat().st_size > 1000


@pytest.mark.grid
@pytest.mark.parametrize("passes", ["recompute", "order_for_memory,cut_apart"])
def test_a_trainer_that_is_cut_computes_what_one_device_does(passes: str) -> None:
    built = blocks(optax.sgd(0.1), rows=64)
    batches = [batch_of(64), batch_of(64)]
    params, _, _ = _after(jf.distribute(*built, "single"), built[1][0], batches)
    strategy = jf.DistributedStrategy(mode="pserver", passes=passes)
    twin = jf.Twin(*built, strategy, servers=2, trainers=2)
    assert any(op.type == "cut" for op in twin.programs().trainer.root.ops)
    found, _, _ = twin.run(built[1][0], batches).states[0]
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # sums over two trainers' rows


@pytest.mark.grid
def test_trainers_fit_a_budget_of_their_own() -> None:
    built = blocks(optax.sgd(0.1), dropout=True)
    batches = [batch_of(ROWS), batch_of(ROWS), batch_of(ROWS // 2)]
    cache, found = ExecutableCache(), []
    for budget in (None, 0.6):
        strategy = jf.DistributedStrategy(mode="pserver", memory_budget=budget)
        twin = jf.Twin(*built, strategy, servers=2, trainers=2, cache=cache)
        reports: list[Any] = []

        def script(step: Any, kept: list[Any] = reports) -> Any:
            kept.append(step.memory_report())
            waits = step.explain().split("a step waits for servers ")[1]
            assert int(waits.split()[0]) <= 2  # for the loss, and for parameters: not at cuts
            state, losses = built[1][0], []
            for batch in batches:
                state, metrics = step(state, batch)
                losses.append(metrics["loss"])
            return step.pull(state), tuple(losses)

        result = twin.play(script)
        found.append(jax.tree.leaves((result.states[0][:2], result.metrics)))
        assert str(reports[0].fit) == str(reports[1].fit)
    report = reports[0]
    assert report.fit is not None
    assert report.fit.passes
    assert report.after_bytes <= report.fit.budget == int(0.6 * report.before_bytes)
    assert report.executables[0] > 1
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # other executables, other sums


def test_a_budget_is_refused_where_trainers_update_by_themselves() -> None:
    built = blocks(optax.sgd(0.1), rows=64)
    strategy = jf.DistributedStrategy(mode="pserver", communication="geo", memory_budget=0.5)
    with pytest.raises(StrategyError, match="communication='geo' is not planned"):
        jf.Twin(*built, strategy, servers=1, trainers=1).programs()


def _after(step: Any, state: Any, batches: list[Any]) -> Any:
    state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
    for batch in batches:
        state, _ = step(state, batch)
    return state
