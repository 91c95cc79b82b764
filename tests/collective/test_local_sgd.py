"""Devices train by themselves and average every k steps, by the algorithm of the paper."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import FeedError, StrategyError
from tests.collective.models import (
    OPTIMIZERS,
    ROWS,
    STEPS,
    State,
    assert_close,
    batch,
    distributed,
    loss,
    start,
    training,
)
from tests.zoo import ZOO


def apart(devices: int, k_steps: int, **options: Any) -> jf.DistributedStrategy:
    return jf.DistributedStrategy(
        devices=devices, communication="local_sgd", k_steps=k_steps, **options
    )


def mean(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *trees)


class Oracle:
    """LocalSGD as in the papers: plain steps on each worker, parameters averaged."""

    def __init__(
        self, tx: optax.GradientTransformation, workers: int, k_steps: int, outer: Any = None
    ) -> None:
        self.k_steps, self.count, self.meetings = k_steps, 0, 0
        self.step: Callable[..., Any] = jax.jit(training(tx))
        self.states = [start(tx) for _ in range(workers)]
        self.met: Any = self.states[0].params
        self.outer, self.kept = outer, None if outer is None else outer.init(self.met)

    def __call__(self, data: Any) -> float:
        """Does a step on every worker; returns the mean of their losses."""
        share, losses = ROWS // len(self.states), []
        for n, state in enumerate(self.states):
            own = tuple(x[n * share : (n + 1) * share] for x in data)
            self.states[n], metrics = self.step(state, own)
            losses.append(float(metrics["loss"]))
        self.count += 1
        if self.count >= self.k_steps:
            self.count, self.meetings = 0, self.meetings + 1
            self.meet()
        return float(np.mean(losses))

    def meet(self) -> None:
        ways = [jax.tree.map(np.subtract, self.met, s.params) for s in self.states]
        if self.outer is None:
            self.met = jax.tree.map(lambda x, d: jnp.asarray(x - d), self.met, mean(ways))
        else:
            updates, self.kept = self.outer.update(mean(ways), self.kept, self.met)
            self.met = optax.apply_updates(self.met, updates)
        self.states = [State(self.met, s.opt) for s in self.states]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "devices", "k_steps"),
    [("sgd", 2, 4), ("momentum", 4, 1), ("adam", 4, 4), ("clipped", 2, 3)],
)
def test_devices_do_what_the_algorithm_says(name: str, devices: int, k_steps: int) -> None:
    step, state = distributed(name, apart(devices, k_steps))
    oracle = Oracle(OPTIMIZERS[name](), devices, k_steps)
    for number in range(STEPS):
        state, metrics = step(state, batch(number))
        np.testing.assert_allclose(metrics["loss"], oracle(batch(number)), rtol=1e-5)
        assert_close(state.params, oracle.met, f"after step {number}")
    assert oracle.meetings == STEPS // k_steps
    pulled = step.pull(state)
    assert_close(pulled.params, mean([s.params for s in oracle.states]))
    assert_close(pulled.opt, mean([s.opt for s in oracle.states]))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("outer", "devices"),
    [(optax.sgd(0.7, momentum=0.9, nesterov=True), 2), (optax.adam(0.05), 4)],
    ids=["nesterov", "adam"],
)
def test_an_outer_optimizer_takes_the_mean_way_as_its_gradient(
    outer: Any, devices: int, tmp_path: Path
) -> None:
    step, state = distributed("adam", apart(devices, 3, outer=outer))
    oracle = Oracle(OPTIMIZERS["adam"](), devices, 3, outer)
    for number in range(STEPS):
        state, _ = step(state, batch(number))
        oracle(batch(number))
        assert_close(state.params, oracle.met, f"after step {number}")
    step.save(tmp_path / "outer", state)
    again, _ = distributed("adam", apart(devices, 3, outer=outer))
    other = again.restore(tmp_path / "outer")
    for number in range(STEPS, STEPS + 4):
        state, _ = step(state, batch(number))
        other, _ = again(other, batch(number))
    assert_close(other.params, state.params, allowed=0)
    assert "an outer optimizer" in step.explain()
    assert "parameters: 3 all-reduces when devices meet" in step.explain()


@pytest.mark.grid
def test_devices_meet_more_often_as_the_loss_falls() -> None:
    most = 6
    step, state = distributed("adam", apart(2, most, adaptive="loss"))
    oracle = Oracle(OPTIMIZERS["adam"](), 2, most)
    losses: list[float] = []
    periods, first, meetings = [most], 0.0, 0
    for number in range(40):
        losses.append(oracle(batch(number % 4)))
        state, _ = step(state, batch(number % 4))
        if oracle.meetings > meetings:
            meetings, value = oracle.meetings, float(np.mean(losses))
            first, losses = first or value, []
            oracle.k_steps = min(most, max(1, math.ceil(math.sqrt(value / first) * most)))
            periods.append(oracle.k_steps)
        assert_close(state.params, oracle.met, f"after step {number}")
        assert step.stats()["held"]["meet.every"] == oracle.k_steps
    assert periods[-1] < most - 1
    with pytest.raises(StrategyError, match="adaptive is 'cost', and the step returns no such"):
        distributed("adam", apart(2, most, adaptive="cost"))


def test_a_loss_that_is_no_number_says_nothing_of_how_far_it_has_fallen() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.2))

    def train_step(state: Any, data: Any) -> Any:
        rows, odd = data
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.square(rows * w)))(state["w"])
        updates, opt = tx.update(grad, state["opt"], state["w"])
        new = {"w": optax.apply_updates(state["w"], updates), "opt": opt}
        return new, {"loss": value + jnp.sum(odd)}

    w, ones, zeros = jnp.ones(()), np.ones(4, np.float32), np.zeros(4, np.float32)
    state: Any = {"w": w, "opt": tx.init(w)}
    step = jf.distribute(train_step, (state, (ones, zeros)), apart(2, 4, adaptive="loss"))
    periods = []
    for number in range(12):
        odd = np.full(4, np.inf, np.float32) if number == 1 else zeros
        state, _ = step(state, (ones, odd))
        periods.append(step.stats()["held"]["meet.every"])
    assert periods == [4] * 11 + [1]  # at the third exchange: the second's loss is the first known


def test_an_outer_optimizer_must_be_one_that_can_be_held() -> None:
    def begin(params: Any) -> Any:
        return jax.tree.map(lambda x: 2 * x, params)

    odd = optax.GradientTransformation(begin, optax.identity().update)
    with pytest.raises(StrategyError, match="begins with no number"):
        distributed("sgd", apart(2, 2, outer=odd))
    with pytest.raises(StrategyError, match="cannot be traced as an optimizer"):
        distributed("sgd", apart(2, 2, outer="sgd"))
    with pytest.raises(StrategyError, match="outer with communication 'sync'"):
        jf.DistributedStrategy(outer=optax.sgd(0.7))


def test_meeting_at_every_step_is_one_device_with_the_whole_batch() -> None:
    tx = OPTIMIZERS["sgd"]()
    step, state = distributed("sgd", apart(4, 1))
    one, wanted = jax.jit(training(tx)), start(tx)
    for number in range(STEPS):
        state, metrics = step(state, batch(number))
        wanted, expected = one(wanted, batch(number))
        assert_close((state.params, metrics), (wanted.params, expected), f"after step {number}")


@pytest.mark.grid
@pytest.mark.parametrize("name", ["fancy_index", "contrastive"])
def test_what_rows_of_other_devices_ask_for_is_added_up_once(name: str) -> None:
    rate, entry = 0.1, ZOO[name]
    built = entry.build(lambda _: jf.distributed_optimizer(optax.sgd(rate)))
    plain = entry.build(lambda _: optax.sgd(rate))
    data = built.batch(0, entry.rows)
    step = jf.distribute(built.train_step, (built.state, data), apart(2, 1))
    state, _ = step(built.state, data)
    wanted, _ = jax.jit(plain.train_step)(plain.state, data)
    assert_close(step.pull(state), wanted)


@pytest.mark.grid
def test_what_each_device_has_is_saved_and_restored(tmp_path: Path) -> None:
    step, state = distributed("adam", apart(2, 3))
    for number in range(4):  # one step after an exchange: devices differ
        state, _ = step(state, batch(number))
    step.save(tmp_path / "apart", state)
    again, _ = distributed("adam", apart(2, 3))
    other = again.restore(tmp_path / "apart")
    for number in range(4, 8):
        state, wanted = step(state, batch(number))
        other, metrics = again(other, batch(number))
        assert_close((other.params, metrics), (state.params, wanted), allowed=0)
    single, _ = distributed("adam", jf.DistributedStrategy(mode="single"))
    restored = single.restore(tmp_path / "apart")
    assert_close(restored.opt[0].count, 4)
    single(restored, batch(4))


def test_a_new_state_begins_anew_and_moments_are_pulled() -> None:
    step, state = distributed("adam", apart(2, 4))
    first, _ = step(state, batch(0))
    with pytest.raises(FeedError, match="lives on the devices, each its own"):
        np.asarray(first.opt[0].mu["w1"])
    fresh = start(OPTIMIZERS["adam"]())
    again, metrics = step(fresh, batch(0))
    assert_close(metrics["loss"], loss(start(OPTIMIZERS["adam"]()).params, batch(0)))
    with pytest.raises(FeedError, match="is of another step"):
        step(State(again.params, first.opt), batch(0))
    pulled = step.pull(again)
    found, _ = step(pulled, batch(1))  # continues from the mean over all
    assert_close(step.pull(found).opt[0].count, 2)
    assert "every 4 steps" in step.explain()


def test_what_makes_no_sense_together_is_refused() -> None:
    with pytest.raises(StrategyError, match="sharded with communication 'local_sgd'"):
        apart(2, 2, sharded=True)
    with pytest.raises(StrategyError, match="local_statistics with communication"):
        apart(2, 2, local_statistics=True)
    with pytest.raises(StrategyError, match="'local_sgd' in mode 'pserver'"):
        apart(2, 2, mode="pserver")
