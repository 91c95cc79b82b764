"""Federated averaging: trainers train alone for a round, and servers average the results."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from tests.fluid.nets import fresh
from tests.fluid.pserver.jobs import Feed, Script, held, run_alone
from tests.fluid.pserver.memory import Job
from tests.fluid.pserver.test_executors import batches, net

ROUNDS, STEPS = 2, 3
SAMPLES = (24.0, 8.0)  # of each trainer, in a round
BUILD = partial(net, lambda: fluid.optimizer.Momentum(0.01, 0.9))


class Averaged(Script):
    """A script whose trainers are averaged."""

    weighted = False

    def transpiled(self, number: int = 0) -> tuple[Any, fluid.Program, fluid.Variable]:
        transpiler = fluid.FLDistributeTranspiler(weighted=self.weighted)
        with fresh() as (main, startup):
            loss = self.build()
            main.random_seed = startup.random_seed = self.seed
            where = ",".join(self.endpoints)
            transpiler.transpile(number, pservers=where, trainers=self.trainers)
        return transpiler, startup, loss

    def rounds(self, number: int, fed: Sequence[Feed]) -> dict[str, np.ndarray]:
        """Runs a trainer; returns its state after the last round."""
        transpiler, startup, _ = self.transpiled(number)
        exe, scope = self.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        weight = {transpiler.samples: np.array([SAMPLES[number]], np.float32)}
        for at in range(ROUNDS):
            exe.run(transpiler.recv_program, scope=scope)
            for batch in fed[at * STEPS : (at + 1) * STEPS]:
                exe.run(transpiler.train_program, feed=dict(batch), scope=scope)
            exe.run(transpiler.send_program, feed=weight if self.weighted else {}, scope=scope)
        exe.run(transpiler.recv_program, scope=scope)
        exe.close()
        return held(transpiler.get_trainer_program(wait_port=False), scope)


def run(feeds: Sequence[Sequence[Feed]], *, servers: int, weighted: bool = False) -> list[Any]:
    """Returns the final state of each trainer."""
    endpoints = [f"127.0.0.1:{7501 + n}" for n in range(servers)]
    script = Averaged(Job(), BUILD, endpoints, len(feeds))
    script.weighted = weighted
    people: dict[str, Callable[[], Any]] = {
        f"server {n}": partial(script.serve, n, fluid.Scope()) for n in range(servers)
    }
    people |= {f"trainer {n}": partial(script.rounds, n, fed) for n, fed in enumerate(feeds)}
    done = script.job.run(people)
    return [done[f"trainer {n}"] for n in range(len(feeds))]


def by_hand(feeds: Sequence[Sequence[Feed]], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """Returns the result of rounds in one process per trainer, averaged by numpy."""
    with fresh() as (main, startup):
        BUILD()
        main.random_seed = startup.random_seed = 7
    exe, scopes = fluid.Executor(fluid.CPUPlace()), [fluid.Scope() for _ in feeds]
    for scope in scopes:
        # Another executor: a second run of the same one draws other numbers.
        fluid.Executor(fluid.CPUPlace()).run(startup, scope=scope)
    for at in range(ROUNDS):
        for fed, scope in zip(feeds, scopes, strict=True):
            for batch in fed[at * STEPS : (at + 1) * STEPS]:
                exe.run(main, feed=dict(batch), scope=scope)
        made = [held(main, scope) for scope in scopes]
        mean = {n: np.average([one[n] for one in made], 0, weights) for n in made[0]}
        for scope in scopes:
            scope.keep({name: np.asarray(value, np.float32) for name, value in mean.items()})
    return mean


def feeds() -> list[list[Feed]]:
    fed = batches(2 * ROUNDS * STEPS)
    return [fed[::2], fed[1::2]]


def check(found: list[Any], wanted: dict[str, np.ndarray]) -> None:
    for params in found:
        for name, value in wanted.items():
            np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("servers", [1, 2])
def test_rounds_come_to_the_mean_of_what_trainers_made(servers: int) -> None:
    check(run(feeds(), servers=servers), by_hand(feeds(), (1.0, 1.0)))


def test_a_trainer_counts_by_its_samples_where_that_is_asked_for() -> None:
    check(run(feeds(), servers=2, weighted=True), by_hand(feeds(), SAMPLES))


def test_one_trainer_trains_as_one_process() -> None:
    fed = feeds()[0]
    check(run([fed], servers=2), run_alone(BUILD, fed).params[0])
