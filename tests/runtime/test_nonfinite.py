"""A loss or a gradient that is not finite is warned of once, with the step, or ends the job."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import ProgramError, StrategyError
from jaxfleet.runtime.finite_watch import FiniteWatch
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.runtime.twin import Twin
from tests.faults import training

TX = jf.distributed_optimizer(optax.sgd(0.1))


def loss_step(state: Any, batch: Any) -> Any:
    """Has a loss that is as its batch."""
    params, opt = state
    loss, grads = jax.value_and_grad(lambda p: (p * batch["x"]).sum())(params)
    updates, opt = TX.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": loss}


def gradient_step(state: Any, batch: Any) -> Any:
    """Has a finite loss, and a gradient that is none where the batch is zero."""
    params, opt = state

    def loss_of(p: Any) -> Any:
        return jnp.where(batch["x"] > 0, jnp.sqrt(p * batch["x"]), 0.0).sum()

    grads = jax.grad(loss_of)(params)
    updates, opt = TX.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": jnp.float32(1.0)}


def start() -> Any:
    params = jnp.ones(4, jnp.float32)
    return params, TX.init(params)


def batch(value: float) -> Any:
    return {"x": np.full((8, 4), value, np.float32)}


def strategy(mode: Any, action: Any) -> jf.DistributedStrategy:
    return jf.DistributedStrategy(mode=mode, on_nonfinite=action, min_block_size=1)


def note(watch: FiniteWatch, metrics: Any) -> None:
    leaves, tree = jax.tree_util.tree_flatten(metrics)
    watch.note(leaves, tree, [])


def trained(step: Any, values: list[float]) -> Any:
    state = start()
    with step:
        for value in values:
            state, _ = step(state, batch(value))
    return state


@pytest.mark.parametrize("mode", ["single", "collective"])
def test_a_loss_is_warned_of_once_with_its_step(mode: str) -> None:
    step = jf.distribute(loss_step, (start(), batch(1.0)), strategy(mode, "warn"))
    with pytest.warns(UserWarning, match=r"metric \['loss'\] is nan at step 3") as warned:
        trained(step, [1.0, 1.0, np.nan, np.nan, 1.0])
    assert len(warned) == 1


@pytest.mark.parametrize("mode", ["single", "collective"])
@pytest.mark.parametrize("train_step", [loss_step, gradient_step])
def test_a_job_may_end_at_that_step(mode: str, train_step: Callable[..., Any]) -> None:
    step = jf.distribute(train_step, (start(), batch(1.0)), strategy(mode, "raise"))
    bad = np.inf if train_step is loss_step else 0.0
    state, _ = step(start(), batch(1.0))
    with pytest.raises(ProgramError, match="step 2"):
        step(state, batch(bad))


def test_a_gradient_is_found_in_the_state_although_the_loss_is_finite() -> None:
    step = jf.distribute(gradient_step, (start(), batch(1.0)), strategy("single", "warn"))
    with pytest.warns(UserWarning, match="the state is not finite after step 16: state/0"):
        trained(step, [1.0, 1.0, 0.0, *[1.0] * 14])


def test_a_job_with_servers_warns_on_its_first_trainer() -> None:
    twin = Twin(loss_step, (start(), batch(1.0)), strategy("pserver", "warn"))
    with pytest.warns(UserWarning, match="is nan at step 2") as warned:
        twin.run(start(), [batch(1.0), batch(np.nan), batch(np.nan)])
    assert len(warned) == 1


def test_a_job_with_servers_may_end_at_that_step() -> None:
    errors = []

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        state, _ = step(start(), batch(1.0))
        with pytest.raises(ProgramError, match="step 2") as raised:
            step(state, batch(0.0))
        errors.append(raised.value)
        return None, ()

    Twin(gradient_step, (start(), batch(1.0)), strategy("pserver", "raise")).play(script)
    assert len(errors) == 2


@pytest.mark.parametrize("mode", ["single", "collective", "pserver"])
def test_a_step_whose_gradient_is_not_finite_may_be_left_out(mode: str) -> None:
    values, chosen = [1.0, 0.0, 1.0], strategy(mode, "skip")
    if mode == "pserver":
        twin = Twin(gradient_step, (start(), batch(1.0)), chosen)
        found = twin.run(start(), [batch(value) for value in values]).states[0]
    else:
        step = jf.distribute(gradient_step, (start(), batch(1.0)), chosen)
        found = trained(step, values)
    wanted = trained(
        jf.distribute(gradient_step, (start(), batch(1.0)), strategy("single", "warn")), [1.0, 1.0]
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)  # devices add in another order


def test_a_step_that_is_left_out_changes_no_statistics_either() -> None:
    words = training.arguments([])
    chosen = dataclasses.replace(training.strategy(words), on_nonfinite="skip")
    good, bad = training.batches(2, "norm")
    bad["x"][:] = np.nan
    twin = Twin(training.make_step("norm"), (training.start("norm"), good), chosen)
    with pytest.warns(UserWarning, match="is nan at step 2"):
        found = twin.run(training.start("norm"), [good, bad, good])
    wanted = twin.run(training.start("norm"), [good, good])
    for one, other in zip(found.states, wanted.states, strict=True):
        for name, array in training.named(one).items():
            np.testing.assert_array_equal(array, training.named(other)[name], name)


def test_training_that_stays_finite_is_not_warned_of() -> None:
    step = jf.distribute(loss_step, (start(), batch(1.0)), strategy("single", "warn"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(step, [0.5, 1e4] * 10)


def test_a_bound_that_begins_infinite_is_not_warned_of() -> None:
    def least_step(state: Any, batch: Any) -> Any:
        (params, opt), metrics = loss_step(state["inner"], batch)
        return {"inner": (params, opt), "most": state["most"]}, metrics

    state = {"inner": start(), "most": jnp.asarray(np.inf)}
    step = jf.distribute(least_step, (state, batch(1.0)), strategy("single", "raise"))
    for _ in range(2):
        state, _ = step(state, batch(0.5))


def test_a_metric_whose_memory_the_script_gave_away_is_passed_over() -> None:
    step = jf.distribute(loss_step, (start(), batch(1.0)), strategy("single", "warn"))
    add = jax.jit(lambda total, new: total + new["loss"], donate_argnums=1)
    state, total = start(), jnp.zeros(())
    with step:
        for _ in range(3):
            state, metrics = step(state, batch(1.0))
            jax.block_until_ready(metrics)
            total = add(total, metrics)
            metrics["loss"].delete()


def test_a_step_that_is_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    warned: list[str] = []
    watch = FiniteWatch("warn", [], warn=warned.append, clock=lambda: now)
    monkeypatch.setattr("jaxfleet.runtime.finite_watch._Numbers.is_ready", False)
    now = 1.0
    note(watch, {"loss": jnp.asarray(np.nan)})
    assert warned == []
    watch.look()
    assert len(warned) == 1


def test_a_metric_that_is_nan_by_nature_does_not_silence_the_loss() -> None:
    warned: list[str] = []
    watch = FiniteWatch("warn", [], warn=warned.append)
    for loss in (1.0, np.nan, np.nan):
        note(watch, {"rare": jnp.asarray(np.nan), "loss": jnp.asarray(loss)})
    watch.look()
    assert ["'rare'" in text for text in warned] == [True, False]
    assert "metric ['loss'] is nan at step 2" in warned[1]


class Slow:
    """A metric that counts how often it is read."""

    size, dtype, reads = 1, np.dtype(np.float32), 0

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.reads += 1
        return np.zeros(1, np.float32)


def test_short_steps_are_looked_at_together() -> None:
    now = 0.0
    watch, metric = FiniteWatch("warn", [], clock=lambda: now), Slow()
    for at in range(10_000):
        now = at * 1e-5
        note(watch, {"loss": metric})
    assert metric.reads < 100


def test_another_word_is_refused() -> None:
    with pytest.raises(StrategyError, match="on_nonfinite"):
        jf.DistributedStrategy(on_nonfinite="stop")  # type: ignore[arg-type]
