"""Modes whose trainers do not wait for each other: with one trainer, they equal sync.

With several, the tests check properties of any order: no gradient is lost or applied twice (with
SGD and gradients that do not depend on parameters, the sum is the same in any order), and every
trainer continues with a state that contains its own last step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh
from tests.fluid.pserver import test_sparse
from tests.fluid.pserver.jobs import Feed, Script, held, run_alone, run_job, shared_out
from tests.fluid.pserver.memory import Job
from tests.fluid.pserver.test_executors import IN, batches, net

ASYNC: dict[str, Any] = {"sync_mode": False}
MODES: dict[str, dict[str, Any]] = {
    "half_async": ASYNC,
    "async": {**ASYNC, "runtime_split_send_recv": True},
    "dc_asgd": {**ASYNC, "enable_dc_asgd": True},
    "merged": {**ASYNC, "runtime_split_send_recv": True, "completely_not_async": True},
}
RATE = 0.125  # a power of two: sums of these gradients are exact in any order


def linear() -> fluid.Variable:
    """Returns a loss whose gradient is the feed, for any parameters."""
    out = layers.fc(fluid.data("x", [None, IN]), 512, param_attr="w", bias_attr=False)
    loss = layers.reduce_sum(out)
    fluid.optimizer.SGD(RATE).minimize(loss)
    return loss


def whole_numbers(trainers: int) -> tuple[list[list[Feed]], np.ndarray]:
    """Returns the feeds of each trainer, and the sum of their gradients."""
    random = np.random.default_rng(1)
    whole = random.integers(-8, 8, (trainers, 4, 1, IN)).astype(np.float32)
    total = np.repeat(whole.sum((0, 1, 2))[:, None], 512, axis=1)
    return [[{"x": x} for x in fed] for fed in whole], total


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_one_trainer_trains_as_one_process(mode: str) -> None:
    build, fed = partial(net, lambda: fluid.optimizer.Adam(0.01)), batches()
    job, alone = run_job(build, [fed], config=MODES[mode]), run_alone(build, fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["half_async", "async"])
def test_a_schedule_counts_what_is_applied(mode: str) -> None:
    def make() -> Any:
        return fluid.optimizer.SGD(layers.exponential_decay(0.05, 2, 0.5, staircase=True))

    build, fed = partial(net, make), batches()
    job, alone = run_job(build, [fed], config=MODES[mode]), run_alone(build, fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["half_async", "async", "merged"])
def test_a_sparse_table_of_one_trainer_is_that_of_one_process(mode: str) -> None:
    fed = test_sparse.batches()
    job = run_job(test_sparse.net, [fed], config=MODES[mode])
    alone = run_alone(partial(test_sparse.net, is_sparse=False), fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("trainers", [2, 3])
@pytest.mark.parametrize("mode", ["half_async", "async"])
def test_no_gradient_is_lost_or_applied_twice(mode: str, trainers: int) -> None:
    feeds, total = whole_numbers(trainers)
    job = run_job(linear, feeds, config=MODES[mode])
    begun = job.begun[0]["w"]
    parts = {n: np.asarray(v) for scope in job.scopes for n, v in scope.items() if "block" in n}
    found = np.concatenate([parts["w.block0"], parts["w.block1"]])
    np.testing.assert_allclose(found, begun - RATE * total, rtol=1e-5, atol=1e-5)


@pytest.mark.grid
def test_merged_gradients_of_two_trainers_are_those_of_sync() -> None:
    build, fed = partial(net, lambda: fluid.optimizer.Momentum(0.05, 0.9)), batches()
    job, alone = run_job(build, shared_out(fed, 2), config=MODES["merged"]), run_alone(build, fed)
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], rtol=1e-4)


# --- GEO-SGD ---------------------------------------------------------------------------------


class Geo(Script):
    """A script whose trainers exchange deltas."""

    every = 2

    def transpiled(self, number: int = 0) -> tuple[Any, fluid.Program, fluid.Variable]:
        config = fluid.DistributeTranspilerConfig()
        config.geo_sgd_mode, config.geo_sgd_need_push_nums = True, self.every
        transpiler = fluid.transpiler.GeoSgdTranspiler(config)
        with fresh() as (main, startup):
            loss = self.build()
            main.random_seed = startup.random_seed = self.seed
            where = ",".join(self.endpoints)
            transpiler.transpile(number, pservers=where, trainers=self.trainers)
        return transpiler, startup, loss

    def losses(self, number: int, fed: list[Feed]) -> tuple[list[float], dict[str, np.ndarray]]:
        """Runs a trainer; returns its losses and its final state."""
        transpiler, startup, loss = self.transpiled(number)
        exe, scope = self.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        main = transpiler.get_trainer_program(wait_port=False)
        ran = [exe.run(main, feed=dict(f), fetch_list=[loss], scope=scope)[0][0] for f in fed]
        exe.close()
        return [float(value) for value in ran], held(main, scope)


def run_geo(
    build: Callable[[], fluid.Variable], feeds: list[list[Feed]], *, every: int
) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Returns the results of each trainer, and the final state of servers."""
    endpoints = ["127.0.0.1:7601", "127.0.0.1:7602"]
    script, scopes = Geo(Job(), build, endpoints, len(feeds)), [fluid.Scope() for _ in endpoints]
    script.every = every
    people: dict[str, Callable[[], Any]] = {
        f"server {n}": partial(script.serve, n, scope) for n, scope in enumerate(scopes)
    }
    people |= {f"trainer {n}": partial(script.losses, n, fed) for n, fed in enumerate(feeds)}
    done = script.job.run(people)
    there = {n: np.asarray(v) for scope in scopes for n, v in scope.items()}
    return [done[f"trainer {n}"] for n in range(len(feeds))], there


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [1, 2])
def test_one_trainer_of_geo_trains_as_one_process(every: int) -> None:
    build, fed = partial(net, lambda: fluid.optimizer.Adam(0.01)), batches()
    ((losses, params),), there = run_geo(build, [fed], every=every)
    alone = run_alone(build, fed)
    np.testing.assert_allclose(losses, alone.losses[0], rtol=1e-4)
    whole = np.concatenate([there["w.block0"], there["w.block1"]])
    if every == 1:
        np.testing.assert_allclose(whole, params["w"], rtol=1e-5, atol=1e-7)


def test_what_geo_servers_hold_has_half_of_every_change_and_half_of_what_was_kept() -> None:
    """One of two trainers sends half of its delta, and keeps the rest for the next exchange."""
    feeds, _ = whole_numbers(2)
    _, there = run_geo(linear, feeds, every=2)
    begun = run_alone(linear, []).begun[0]["w"]
    wanted = begun.astype(np.float64)
    for fed in feeds:
        kept = np.zeros((IN, 1))
        for first in (0, 2):
            change = kept - RATE * sum(fed[at]["x"].T for at in (first, first + 1))
            wanted, kept = wanted + change / 2, change / 2
    found = np.concatenate([there["w.block0"], there["w.block1"]])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.grid
def test_sparse_rows_of_geo_are_those_that_were_looked_up() -> None:
    fed = test_sparse.batches(4)
    ((losses, _),), there = run_geo(test_sparse.net, [fed], every=2)
    alone = run_alone(partial(test_sparse.net, is_sparse=False), fed)
    np.testing.assert_allclose(losses, alone.losses[0], rtol=1e-4)
    whole = np.concatenate([there["emb.block0"], there["emb.block1"]])
    np.testing.assert_allclose(whole, alone.params[0]["emb"], rtol=1e-4, atol=1e-6)
