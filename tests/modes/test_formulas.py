"""Each mode follows its formula, replicated by numpy step by step."""

from typing import Any

import numpy as np
import pytest

from jaxfleet.runtime.simulated_job import Twin
from tests.modes.linear import (
    CACHE,
    CLOSE,
    RATE,
    ROWS,
    batch,
    first,
    gradient,
    start,
    train_step,
    trained,
    twin,
)

STEPS = 7


@pytest.mark.parametrize("how", ["async", "half_async", "dc_asgd", "fl"])
def test_one_trainer_that_waits_trains_as_one_device_does(how: str) -> None:
    options: Any = {"k_steps": 3} if how == "fl" else {"staleness": 0}
    (found,), _ = trained(how, STEPS, pulls=True, **options)
    w = first()
    for number in range(STEPS):
        w = w - RATE * gradient(w, batch(number))
    np.testing.assert_allclose(found, w, **CLOSE)


def test_half_async_takes_the_mean_of_gradients_of_the_same_values() -> None:
    (found,), (lags,) = trained("half_async", 6, merge=3, staleness=2)
    w = first()
    for begin in (0, 3):
        w = w - RATE * np.mean([gradient(w, batch(begin + at)) for at in range(3)], axis=0)
    np.testing.assert_allclose(found, w, **CLOSE)
    assert lags["histogram"] == {"0": 2, "1": 2, "2": 2}


def test_geo_exchanges_how_far_trainers_went() -> None:
    # With the least staleness trainers proceed in rounds, so the formula is deterministic.
    trainers, k, rounds = 2, 3, 3
    found, lags = trained("geo", k * rounds, trainers=trainers, k_steps=k, staleness=k - 1)
    served, own = first(), [first() for _ in range(trainers)]
    old = [first() for _ in range(trainers)]
    for turn in range(rounds):
        for at in range(turn * k, turn * k + k):
            own = [w - RATE * gradient(w, batch(at), t, trainers) for t, w in enumerate(own)]
        deltas = [(w - w_old) / trainers for w, w_old in zip(own, old, strict=True)]
        served = served + sum(deltas)
        old = [w_old + delta for w_old, delta in zip(old, deltas, strict=True)]
        own = [w + (served - w_old) for w, w_old in zip(own, old, strict=True)]
        old = [served for _ in old]
    for one, wanted in zip(found, own, strict=True):
        np.testing.assert_allclose(one, wanted, **CLOSE)
    assert [lag["max"] for lag in lags] == [k - 1] * trainers


@pytest.mark.parametrize("average", ["trainers", "rows"])
def test_federated_averaging_is_the_mean_of_what_trainers_made(average: str) -> None:
    trainers, k, rounds = 2, 2, 2
    shares = [2, 6]  # rows of each trainer

    def own(data: Any, trainer: int) -> Any:
        rows = slice(0, shares[0]) if trainer == 0 else slice(shares[0], ROWS)
        return {name: array[rows] for name, array in data.items()}

    def script(step: Any) -> Any:
        state, me = start(), step.client.me.trainer
        for number in range(k * rounds):
            state, _ = step(state, own(batch(number), me))
        return np.asarray(state["w"]), ()

    job = twin("fl", trainers=trainers, k_steps=k, average=average, batch="local")
    found = job.play(script).states
    served = first()
    weights = np.asarray(shares if average == "rows" else [1, 1], np.float64)
    for turn in range(rounds):
        made = [served, served]
        for at in range(turn * k, turn * k + k):
            made = [
                w - RATE * np.asarray(_local_gradient(w, own(batch(at), trainer)))
                for trainer, w in enumerate(made)
            ]
        served = np.average(made, axis=0, weights=weights)
    for one in found:
        np.testing.assert_allclose(one, served, **CLOSE)


def _local_gradient(w: np.ndarray, data: Any) -> np.ndarray:
    x, y = data["x"].astype(np.float64), data["y"].astype(np.float64)
    grad: np.ndarray = 2.0 / len(y) * x.T @ (x @ w - y)
    return grad


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["async", "half_async", "geo", "dc_asgd", "fl"])
def test_a_run_is_the_same_every_time(how: str) -> None:
    options: Any = {"trainers": 3, "k_steps": 2, "batch": "local"}
    ends = [trained(how, 5, **options)[0] for _ in range(2)]
    for one, other in zip(*ends, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("how", ["async", "half_async", "geo", "dc_asgd", "fl"])
def test_programs_say_their_mode(how: str) -> None:
    programs = Twin(
        train_step, (start(), batch(0)), twin(how).strategy, servers=1, trainers=2, cache=CACHE
    ).programs()
    (server,) = programs.servers
    assert server.attrs["communication"] == programs.trainer.attrs["communication"] == how
    modes = {"async": 1, "half_async": 2, "geo": 3, "dc_asgd": 1, "fl": 0}
    assert server.root.ops[0].attrs["distributed_mode"] == modes[how]
    barriers = {op.type for op in programs.trainer.root.ops} & {"send_barrier", "fetch_barrier"}
    assert bool(barriers) == (how == "fl")
    assert ("backups" in server.attrs) == (how == "dc_asgd")
