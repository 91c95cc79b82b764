"""A loss or gradient that is not finite causes one warning, with the step, or ends the job."""

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
from jaxfleet.runtime.nonfinite_watch import FiniteWatch
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.runtime.trainer_step import TrainerStep
from tests.faults import training

TX = jf.distributed_optimizer(optax.sgd(0.1))


def loss_step(state: Any, batch: Any) -> Any:
    params, opt = state
    loss, grads = jax.value_and_grad(lambda p: (p * batch["x"]).sum())(params)
    updates, opt = TX.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": loss}


def gradient_step(state: Any, batch: Any) -> Any:
    """A step with a finite loss, whose gradient is not finite if the batch is zero."""
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


@pytest.mark.parametrize("mode", ["single", "collective"])
def test_a_gradient_is_warned_of_with_its_step_although_the_loss_is_finite(mode: str) -> None:
    step = jf.distribute(gradient_step, (start(), batch(1.0)), strategy(mode, "warn"))
    with pytest.warns(UserWarning, match="not finite (after|at) step 3") as warned:
        trained(step, [1.0, 1.0, 0.0, 1.0])
    assert len(warned) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"sharded": True},
        {"communication": "local_sgd", "k_steps": 2},
        {"passes": "recompute"},
        {"passes": "recompute", "mode": "single", "devices": None},
    ],
)
def test_it_is_warned_of_however_the_step_is_divided(fields: dict[str, Any]) -> None:
    chosen = dataclasses.replace(strategy("collective", "warn"), **{"devices": 2, **fields})
    step = jf.distribute(gradient_step, (start(), batch(1.0)), chosen)
    with pytest.warns(UserWarning, match=r"(after|at) step 2") as warned:
        trained(step, [1.0, 0.0, 1.0])
    assert len(warned) == 1


def test_the_trainer_with_the_gradient_warns_of_it() -> None:
    good, bad = batch(1.0), batch(1.0)
    bad["x"][4:] = 0.0  # the rows of trainer 1
    twin = Twin(gradient_step, (start(), good), strategy("pserver", "warn"))
    with pytest.warns(UserWarning, match="not finite after step 2: state/0") as warned:
        twin.run(start(), [good, bad, good])
    assert len(warned) == 1


@pytest.mark.parametrize("communication", ["async", "half_async", "geo"])
def test_trainers_that_do_not_wait_warn_of_their_gradients(communication: Any) -> None:
    chosen = dataclasses.replace(strategy("pserver", "warn"), communication=communication)
    twin = Twin(gradient_step, (start(), batch(1.0)), dataclasses.replace(chosen, k_steps=2))
    with pytest.warns(UserWarning, match=r"(after|at) step 2"):
        twin.run(start(), [batch(x) for x in (1.0, 0.0, 1.0)])


def test_a_gradient_that_the_optimizer_mends_is_not_warned_of() -> None:
    mending = jf.distributed_optimizer(optax.chain(optax.zero_nans(), optax.sgd(0.1)))

    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        grads = jax.grad(lambda p: jnp.where(batch["x"] > 0, jnp.sqrt(p * batch["x"]), 0.0).sum())
        updates, opt = mending.update(grads(params), opt, params)
        return (optax.apply_updates(params, updates), opt), {}

    state = (start()[0], mending.init(start()[0]))
    twin = Twin(step, (state, batch(1.0)), strategy("pserver", "warn"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.run(state, [batch(x) for x in (1.0, 0.0, 1.0)])


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


def trained_in(mode: str, chosen: jf.DistributedStrategy, values: list[float]) -> Any:
    if mode == "pserver":
        twin = Twin(gradient_step, (start(), batch(1.0)), chosen)
        return twin.run(start(), [batch(value) for value in values]).states[0]
    return trained(jf.distribute(gradient_step, (start(), batch(1.0)), chosen), values)


@pytest.mark.parametrize("mode", ["single", "collective", "pserver"])
def test_a_step_whose_gradient_is_not_finite_may_be_left_out(mode: str) -> None:
    values, chosen = [1.0, 0.0, 1.0], strategy(mode, "skip")
    with pytest.warns(UserWarning, match="a gradient is not finite at step 2, which changes"):
        found = trained_in(mode, chosen, values)
    wanted = trained(
        jf.distribute(gradient_step, (start(), batch(1.0)), strategy("single", "warn")), [1.0, 1.0]
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)  # devices sum in another order


def counted_step(state: Any, batch: Any) -> Any:
    """As `gradient_step`, with an optimizer that counts its updates and keeps moments."""
    params, opt = state
    grads = jax.grad(lambda p: jnp.where(batch["x"] > 0, jnp.sqrt(p * batch["x"]), 0.0).mean())
    updates, opt = COUNTING.update(grads(params), opt, params)
    return (optax.apply_updates(params, updates), opt), {}


COUNTING = jf.distributed_optimizer(optax.adam(0.1))


def counted_start() -> Any:
    params = jnp.ones(4, jnp.float32)
    return params, COUNTING.init(params)


def one_device(values: list[float]) -> Any:
    chosen = strategy("single", "raise")
    step = jf.distribute(counted_step, (counted_start(), batch(1.0)), chosen)
    state = counted_start()
    for value in values:
        state, _ = step(state, batch(value))
    return state


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:a gradient is not finite at step 3")
@pytest.mark.parametrize("communication", ["async", "half_async", "dc_asgd", "geo", "fl"])
def test_a_trainer_that_waits_for_nobody_leaves_its_step_out(communication: Any) -> None:
    chosen = dataclasses.replace(
        strategy("pserver", "skip"), communication=communication, k_steps=1
    )
    twin = Twin(counted_step, (counted_start(), batch(1.0)), chosen, trainers=1)
    found = twin.run(counted_start(), [batch(x) for x in (1.0, 2.0, 0.0, 1.0)])
    if communication == "dc_asgd":  # the only mode that corrects for stale parameters
        wanted = twin.run(counted_start(), [batch(x) for x in (1.0, 2.0, 1.0)]).states[0]
    else:
        wanted = one_device([1.0, 2.0, 1.0])
    assert_same(found.states[0], wanted)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:a gradient is not finite at step 3")
@pytest.mark.parametrize(
    ("fields", "values", "wanted"),
    [
        ({"sharded": True}, [1.0, 2.0, 0.0, 1.0], [1.0, 2.0, 1.0]),
        ({"communication": "local_sgd", "k_steps": 2}, [1.0, 2.0, 0.0, 1.0], [1.0, 2.0, 1.0]),
        ({"merge": 2}, [1.0, 1.0, 0.0, 1.0], [1.0]),
        ({"passes": "recompute"}, [1.0, 2.0, 0.0, 1.0], [1.0, 2.0, 1.0]),
    ],
)
def test_a_step_is_left_out_however_it_is_divided(
    fields: dict[str, Any], values: list[float], wanted: list[float]
) -> None:
    chosen = dataclasses.replace(strategy("collective", "skip"), **{"devices": 2, **fields})
    step = jf.distribute(counted_step, (counted_start(), batch(1.0)), chosen)
    state = counted_start()
    with step:
        for value in values:
            state, _ = step(state, batch(value))
        assert_same(step.pull(state), one_device(wanted))


@pytest.mark.filterwarnings("ignore:a gradient is not finite at step 2")
def test_the_device_whose_gradient_it_was_leaves_its_step_out_of_local_sgd() -> None:
    chosen = dataclasses.replace(
        strategy("collective", "skip"), devices=2, communication="local_sgd", k_steps=4
    )
    step = jf.distribute(counted_step, (counted_start(), batch(1.0)), chosen)
    half = batch(2.0)
    half["x"][4:] = 0.0
    state = counted_start()
    with step:
        for data in (batch(1.0), half, batch(1.0), batch(1.0)):
            state, _ = step(state, data)
        params = step.pull(state)[0]
    mean = (one_device([1.0, 2.0, 1.0, 1.0])[0] + one_device([1.0, 1.0, 1.0])[0]) / 2
    np.testing.assert_allclose(params, mean, rtol=1e-5)


@pytest.mark.grid
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
    monkeypatch.setattr("jaxfleet.runtime.nonfinite_watch._Numbers.is_ready", False)
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
    """A metric that counts its reads."""

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
