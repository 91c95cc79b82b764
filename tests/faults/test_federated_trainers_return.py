"""Federated trainers that are killed and come back change nothing, whenever they are killed.

Each trainer has an optimizer's state and running means of its own.
"""

import os
import signal
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import PeerLostError
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.messages import Kind, Message
from tests.faults.cluster import Jobs, check_same
from tests.faults.memory_jobs import kill, kill_again
from tests.faults.memory_training import TrainingJob
from tests.faults.test_launched import launched, numbers
from tests.faults.test_trainers_return import (
    AWAY_S,
    kill_at,
    kill_before,
    kill_between_steps,
    saves,
)

pytestmark = pytest.mark.grid  # the default run has the simulation's schedules

STEPS, EVERY = 8, 3  # an exchange after steps 3, 6 and 8
WORDS = (
    f"--steps={STEPS}",
    "--kind=norm",
    "--communication=fl",
    f"--k-steps={EVERY}",
    "--pause=0.15",
    "--step-timeout=30",
)
State = dict[str, np.ndarray]


def waiting(*more: str, **given: Any) -> TrainingJob:
    return TrainingJob(options=[*WORDS, "--on-lost=wait", *more], step_s=30.0, **given)


@cache
def undisturbed(saved_at: int = 0) -> Sequence[State]:
    """Returns the final states of both trainers; a `pull` is an exchange of its own."""
    job = TrainingJob(options=WORDS, step_s=30.0)
    job.between = lambda step, state, done: step.pull(state) if done == saved_at else state
    job.run()
    return job.results()


def check(job: TrainingJob, *, saved_at: int = 0) -> None:
    for found, wanted in zip(job.results(), undisturbed(saved_at), strict=True):
        check_same([found], wanted)


def test_trainers_have_states_of_their_own() -> None:
    first, second = undisturbed()
    same = {name for name in first if np.array_equal(first[name], second[name])}
    assert {name for name in same if name.startswith("[0]")} == {f"[0]['{n}']" for n in "abcd"}
    assert not {name for name in same if name.startswith(("[1][0].mu", "[2]"))}


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_killed_between_steps_changes_nothing(trainer: int, step: int) -> None:
    job, resumed = waiting(), list[int]()
    job.on_resume = lambda number, _state, done: resumed.append(done) if number == trainer else None
    job.run({(trainer, step): lambda: kill(AWAY_S) if job.lives[trainer] == 1 else None})
    assert job.lives[trainer] == 2
    # It has sent nothing of the steps after the last exchange, which it takes again too.
    assert resumed == [0, max(step // EVERY - 1, 0) * EVERY]
    check(job)


@pytest.mark.parametrize("number", range(3, 40, 2))
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_killed_at_any_message_changes_nothing(trainer: int, number: int) -> None:
    job = waiting()
    kill_before(job, trainer, number, away_s=AWAY_S)
    job.run()
    assert job.lives[trainer] == 2
    check(job)


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL, Kind.KEEP])
def test_an_exchange_that_was_under_way_counts_once(kind: Kind, server: int) -> None:
    job = waiting()
    if kind is Kind.KEEP and server:
        pytest.skip("server 0 keeps the trainers' own state")

    def matches(to: int, message: Message) -> bool:
        return to == server and message.kind is kind and message.step == 2

    kill_at(job, 1, matches, away_s=AWAY_S)
    job.run()
    assert job.lives[1] == 2
    check(job)


@pytest.mark.parametrize("number", range(1, 20, 2))
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_killed_in_operations_between_exchanges_does_them_again(
    trainer: int, number: int, tmp_path: Path
) -> None:
    job = waiting()
    is_due = kill_between_steps(job, trainer, number, saves(tmp_path / "saved", 4), after=4)
    job.run()
    assert job.lives[trainer] == 2 or not is_due()
    check(job, saved_at=4)


@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_killed_again_and_again_changes_nothing(trainer: int) -> None:
    job, lives = waiting(), (14, 3, 6, 9, 4, 8)
    kill_again(job, trainer, lives, AWAY_S)
    job.run()
    assert job.lives[trainer] == len(lives) + 1
    check(job)


@pytest.mark.parametrize("number", [4, 14, 20])
def test_all_trainers_killed_at_once_change_nothing(number: int) -> None:
    job, sent = waiting(), [0, 0]

    def look(trainer: int, _server: int, _message: Message) -> None:
        sent[trainer] += 1
        if job.lives[trainer] == 1 and max(sent) >= number:
            kill(AWAY_S + trainer)

    job.on_send = look
    job.run()
    assert job.lives == [2, 2]
    check(job)


@pytest.mark.parametrize("server", [0, 1])
def test_servers_killed_after_a_trainer_returned_change_nothing(
    server: int, tmp_path: Path
) -> None:
    job = waiting(folder=tmp_path, returns_s=30.0)
    job.run(
        {
            (1, 4): lambda: kill(AWAY_S) if job.lives[1] == 1 else None,
            (0, 7): partial(job.kill_server, server, away_s=1.0),
        }
    )
    assert (job.lives, job.starts[server]) == ([1, 2], 2)
    check(job)


@pytest.mark.parametrize("step", [4, 7])
def test_a_server_lost_with_a_trainer_ends_the_job_or_changes_nothing(
    step: int, tmp_path: Path
) -> None:
    # Only the former process had what server 0's checkpoint does not contain.
    job = waiting(folder=tmp_path, returns_s=30.0)

    def kill_both() -> None:
        job.kill_server(0, away_s=1.0)
        kill(2.0)

    job.run({(1, step): lambda: kill_both() if job.lives[1] == 1 else None})
    if job.ends["trainer 1"].error is None:
        check(job)
    else:
        assert "trainer 1 cannot return: server 0" in job.error("trainer 1", PeerLostError)
        assert "trainer 1 cannot return: server 0" in job.error("trainer 0", PeerLostError)


def test_after_a_restore_the_steps_of_its_checkpoint_count(tmp_path: Path) -> None:
    """Both trainers go on from it with the state of trainer 0's own that it has."""
    results = []
    for is_killed in (False, True):
        job, resumed = waiting(), list[tuple[int, int]]()
        folder = tmp_path / f"saved{is_killed}"

        def between(
            step: TrainerStep, state: Any, done: int, *, job: Any = job, folder: Path = folder,
            resumed: list[tuple[int, int]] = resumed,
        ) -> Any:  # fmt: skip
            if done == 4 and job.lives == [1, 1]:
                step.save(folder, state)
                state = step.restore(folder)
                resumed.append((step.client.step, step.resume(state)[1]))
            return state

        def killing(job: Any = job) -> None:
            if job.lives[1] == 1:
                kill(AWAY_S)

        job.between = between
        job.run({(1, 6): killing} if is_killed else None)
        assert resumed == [(2, 4), (2, 4)]  # exchanges and steps
        results.append(job.results())
    for found, wanted in zip(*results, strict=True):
        check_same([found], wanted)


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_launch_starts_a_federated_trainer_again(trainer: int, tmp_path: Path) -> None:
    words = [word for word in WORDS if not word.startswith("--step-timeout")]
    with Jobs(tmp_path) as jobs:
        job = launched(
            jobs, *words, "--on-lost=wait", "--step-timeout=60", launch=["--trainer-restarts=2"]
        )
        job.reaches("step 5.")
        (victim,) = numbers(job.text())[f"trainer {trainer}"]
        os.kill(victim, signal.SIGKILL)
        assert job.ends() == 0
        assert f"trainer {trainer} killed by SIGKILL" in job.text()
        for found, wanted in zip(jobs.results(), undisturbed(), strict=True):
            check_same([found], wanted)
