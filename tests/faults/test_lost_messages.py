"""Lost messages of every kind are requested again."""

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.memory_network import Faults, MemoryNetwork
from jaxfleet.transport.messages import Kind, Message
from tests.faults import training
from tests.faults.cluster import check_same
from tests.faults.conftest import Undisturbed

STEPS = 5


def losing_the(kind: Kind, at: int) -> Faults:
    """Loses one message of a kind: the `at`-th."""
    seen = itertools.count()

    def faults(_: str, message: Message) -> int:
        return 0 if message.kind is kind and next(seen) == at else 1

    return faults


def losing_some(seed: int, share: float) -> Faults:
    """Loses a share of all messages except byes, requests and answers alike.

    A server that receives no bye misses the trainer's heartbeats, of which there are none here.
    """
    draw = random.Random(seed)
    return lambda _, message: int(message.kind is Kind.BYE or draw.random() > share)


@functools.cache
def job(kind: str, communication: str = "sync") -> Twin:
    """Returns a job of two servers and two trainers, compiled once."""
    words = [
        "--step-timeout=600",
        "--connect=600",
        f"--communication={communication}",
        "--k-steps=2",
    ]
    strategy = training.strategy(training.arguments(words))
    example = training.start(kind), next(training.batches(1, kind))
    return Twin(training.make_step(kind), example, strategy)


def trained(kind: str, faults: Faults) -> tuple[list[Any], float]:
    """Returns the trainers' final states, and the job's duration on the network's clock."""
    state, data = training.start(kind), list(training.batches(STEPS, kind))
    network = MemoryNetwork(faults=faults)
    result = job(kind).run(state, data, network=network)
    return [training.named(one) for one in result.states], network.clock()


EVERY_KIND = [
    Kind.HELLO, Kind.WELCOME, Kind.DEFINE, Kind.ASSIGN, Kind.PUSH, Kind.PULL, Kind.VALUES, Kind.OK,
    Kind.BYE,
]  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.value)
def test_a_message_that_is_lost_is_made_good_within_seconds(
    kind: Kind, at: int, undisturbed: Undisturbed
) -> None:
    states, took_s = trained("plain", losing_the(kind, at))
    check_same(states, undisturbed("plain", STEPS))
    assert took_s < 15.0


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Kind.REDUCE, Kind.REDUCED], ids=lambda kind: kind.value)
def test_a_collective_that_is_lost_is_made_good_within_seconds(
    kind: Kind, undisturbed: Undisturbed
) -> None:
    states, took_s = trained("norm", losing_the(kind, 1))
    check_same(states, undisturbed("norm", STEPS))
    assert took_s < 15.0


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Kind.LOOK_UP, Kind.ROWS, Kind.PUSH_ROWS], ids=lambda k: k.value)
def test_rows_that_are_lost_are_made_good_within_seconds(
    kind: Kind, undisturbed: Undisturbed
) -> None:
    states, took_s = trained("table", losing_the(kind, 1))
    check_same(states, undisturbed("table", STEPS))
    assert took_s < 15.0


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["plain", "clip", "norm", "table"])
def test_any_messages_may_be_lost(kind: str, seed: int, undisturbed: Undisturbed) -> None:
    states, _ = trained(kind, losing_some(seed, 0.1))
    check_same(states, undisturbed(kind, STEPS))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("seed", "share"),
    [(0, 0.1), (1, 0.1), *(pytest.param(n, 0.3, marks=pytest.mark.grid) for n in range(2, 22))],
)
@pytest.mark.parametrize("communication", ["async", "half_async"])
def test_trainers_that_do_not_wait_lose_nothing_either(
    communication: str, seed: int, share: float
) -> None:
    state, data = training.start("count"), list(training.batches(STEPS))
    network = MemoryNetwork(faults=losing_some(seed, share))
    result = job("count", communication).run(state, data, network=network)
    # Gradients and the rate are 1: parameters count the applied updates. The trainer that ends last
    # sees all of them.
    counts = [-training.named(one)["[0]['d']"] for one in result.states]
    assert max(count.max() for count in counts) == 2 * STEPS
    assert all((count == count[0]).all() for count in counts)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("kind", ["plain", "clip", "norm", "table"])
def test_any_third_of_the_messages_may_be_lost(
    kind: str, seed: int, undisturbed: Undisturbed
) -> None:
    states, _ = trained(kind, losing_some(seed, 0.3))
    check_same(states, undisturbed(kind, STEPS))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.LOAD, Kind.OK], ids=lambda kind: kind.value)
@pytest.mark.parametrize("at", [0, 1, 4, 6])
def test_saving_and_restoring_may_lose_messages(
    kind: Kind, at: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    state, data = training.start("plain"), list(training.batches(STEPS))

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        here: Any = state
        for batch in data[:2]:
            here, _ = step(here, batch)
        step.save(tmp_path / "saved", here)
        for batch in data[3:]:
            here, _ = step(here, batch)
        here = step.restore(tmp_path / "saved")
        for batch in data[2:]:
            here, _ = step(here, batch)
        return step.pull(here), ()

    network = MemoryNetwork(faults=losing_the(kind, at))
    result = job("plain").play(script, network=network)
    states = [training.named(one) for one in result.states]
    check_same(states, undisturbed("plain", STEPS))
    assert network.clock() < 20.0
