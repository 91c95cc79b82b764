"""Trainers that are killed and come back where trainers do not wait for each other at every step.

Gradients and the rate are 1, so parameters and rows of a table count the applied updates: those of
the former process and those that the new one takes again count once.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.messages import Kind, Message
from tests.faults import training
from tests.faults.memory_jobs import kill, kill_again
from tests.faults.memory_leases import ROWS, SAMPLES, LeasingJob
from tests.faults.memory_training import TrainingJob
from tests.faults.test_asynchronous_modes import lowest
from tests.faults.test_leases import ONCE, dying, once
from tests.faults.test_modes import EVERY, STEPS, TRAINERS, counted, options
from tests.faults.test_trainers_return import (
    AWAY_S,
    kill_at,
    kill_before,
    kill_between_steps,
    saves,
)

pytestmark = pytest.mark.grid  # the default run has the simulation's schedules

WAITS = (f"--steps={STEPS}", "--pause=0.15", "--on-lost=wait")
ASYNC = ("--kind=count_rows", "--communication=async", "--staleness=5", "--step-timeout=30")
MODES = ("async", "merged", "half_async", "dc_asgd", "geo")


def words(mode: str) -> tuple[str, ...]:
    if mode in {"async", "merged"}:
        return (*ASYNC, *WAITS, f"--merge={3 if mode == 'merged' else 1}")
    return (*options(mode), *WAITS)


def total(mode: str) -> float:
    return -TRAINERS * STEPS if mode in {"async", "merged"} else counted(mode)


def job_of(mode: str, *more: str, **given: Any) -> TrainingJob:
    return TrainingJob(options=[*words(mode), *more], step_s=30.0, **given)


def check_counts(job: TrainingJob, mode: str) -> None:
    """Checks that each step counts once, but for what a trainer in geo had yet to send of it."""
    found = lowest(job.results())
    if mode == "geo":
        assert total(mode) <= min(found)
        assert max(found) <= total(mode) + EVERY
    else:
        assert found == {total(mode)}


@pytest.mark.parametrize("number", range(3, 60, 15))
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_killed_at_any_message_counts_once(mode: str, trainer: int, number: int) -> None:
    job = job_of(mode)
    kill_before(job, trainer, number, away_s=AWAY_S)
    job.run()
    assert job.lives[trainer] == 2
    check_counts(job, mode)
    staleness = job.ends[f"trainer {trainer}"].stats["staleness"]
    assert staleness["max"] <= staleness["bound"]


@pytest.mark.parametrize("which", [Kind.PUSH, Kind.PUSH_ROWS, Kind.PULL])
@pytest.mark.parametrize("mode", MODES)
def test_what_only_one_server_has_of_a_step_counts_once(mode: str, which: Kind) -> None:
    job = job_of(mode)

    def matches(server: int, message: Message) -> bool:
        return message.kind is which and message.step >= 6 and server == 1

    kill_at(job, 1, matches, away_s=AWAY_S)
    job.run()
    assert job.lives[1] == 2
    check_counts(job, mode)


@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("mode", ["merged", "geo"])
def test_a_trainer_killed_again_and_again_counts_once(mode: str, trainer: int) -> None:
    job, lives = job_of(mode), (19, 3, 6, 9, 4, 20)
    kill_again(job, trainer, lives, AWAY_S)
    job.run()
    assert job.lives[trainer] == len(lives) + 1
    if mode == "geo":  # each death loses as much again
        assert total(mode) <= min(lowest(job.results()))
    else:
        check_counts(job, mode)


@pytest.mark.parametrize("number", [1, 4, 17, 24])
def test_all_trainers_killed_at_once_count_once(number: int) -> None:
    job, sent = job_of("merged"), [0, 0]

    def look(trainer: int, _server: int, _message: Message) -> None:
        sent[trainer] += 1
        if job.lives[trainer] == 1 and max(sent) >= number:
            kill(AWAY_S + trainer)

    job.on_send = look
    job.run()
    assert job.lives == [2, 2]
    check_counts(job, "merged")


@pytest.mark.parametrize("away_s", [1.0, 12.0])
@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("mode", ["merged", "half_async", "dc_asgd"])
def test_a_server_and_a_trainer_that_die_together_count_once(
    mode: str, server: int, away_s: float, tmp_path: Path
) -> None:
    # The server lacks what came after its checkpoint, and the new process takes those steps again.
    job = job_of(mode, folder=tmp_path, returns_s=30.0)

    def kill_both() -> None:
        job.kill_server(server, away_s=away_s)
        kill(2.0)

    job.run({(1, 8): lambda: kill_both() if job.lives[1] == 1 else None})
    assert (job.lives[1], job.starts[server]) == (2, 2)
    check_counts(job, mode)


@pytest.mark.parametrize("mode", ["merged", "dc_asgd"])
def test_servers_killed_after_a_trainer_returned_count_once(mode: str, tmp_path: Path) -> None:
    job = job_of(mode, folder=tmp_path, returns_s=30.0)
    job.run(
        {
            (1, 3): lambda: kill(AWAY_S) if job.lives[1] == 1 else None,
            (0, 9): partial(job.kill_server, 0, away_s=1.0),
            (1, 10): partial(job.kill_server, 1, away_s=1.0),
        }
    )
    assert (job.lives, job.starts) == ([1, 2], [2, 2])
    check_counts(job, mode)


@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("number", range(1, 14, 4))
@pytest.mark.parametrize("mode", ["merged", "dc_asgd"])
def test_a_trainer_killed_in_operations_between_steps_does_them_again(
    mode: str, trainer: int, number: int, tmp_path: Path
) -> None:
    job = job_of(mode)
    is_due = kill_between_steps(job, trainer, number, saves(tmp_path / "saved", 7), after=7)
    job.run()
    assert job.lives[trainer] == 2 or not is_due()
    check_counts(job, mode)
    example = training.start("count_rows"), next(training.batches(1, "count_rows"))
    single: Any = jf.distribute(training.make_step("count_rows"), example, "single")
    saved = training.named(single.restore(tmp_path / "saved"))
    assert {float(array.max()) for name, array in saved.items() if name.startswith("[0]['a")} == {
        -7.0 * TRAINERS
    }


def test_a_returned_trainer_that_begins_anew_is_told_to_resume() -> None:
    job = job_of("async", "--return-s=12")
    job.resumes = False
    job.run({(1, 3): lambda: kill(AWAY_S) if job.lives[1] == 1 else None})
    text = job.error("trainer 1", FeedError)
    assert "trainer 1 returns to a job at step 3, and begins with a state of its own" in text


@pytest.mark.parametrize("trainer", [0, 1])
def test_a_returned_trainer_receives_the_own_state_of_trainer_0(trainer: int) -> None:
    words = ["--kind=norm", "--communication=async", "--staleness=2", "--step-timeout=30", *WAITS]
    job = TrainingJob(options=words, step_s=30.0)
    kept: list[np.ndarray] = []  # running means of trainer 0 after its steps
    received: list[np.ndarray] = []

    def between(step: TrainerStep, state: Any, _done: int) -> Any:
        if step.client.me.trainer == 0 and job.lives == [1, 1]:
            kept.append(np.asarray(state[2][0]))
        return state

    def note(number: int, state: Any, done: int) -> None:
        if number == trainer and job.lives[number] == 2:
            assert done == 5  # step 6 is taken again
            received.append(np.asarray(state[2][0]))

    job.between, job.on_resume = between, note
    job.run({(trainer, 6): lambda: kill(AWAY_S) if job.lives[trainer] == 1 else None})
    job.results()
    (found,) = received
    same = [at for at, mean in enumerate(kept, 1) if np.array_equal(mean, found)]
    assert same == ([5] if trainer == 0 else [len(kept)])


@pytest.mark.parametrize("number", range(4, 44, 8))
@pytest.mark.parametrize("mode", [{}, {"merge": 4, "staleness": 6}])
def test_samples_of_a_trainer_that_returns_are_applied_once(
    mode: dict[str, Any], number: int
) -> None:
    strategy = {**mode, "on_trainer_lost": "wait", "trainer_return_s": 30.0}
    job = LeasingJob(step_s=30.0, strategy=strategy, pauses=(0.3, 0.1))
    dying(number, job, away_s=1.0)
    job.run()
    assert job.lives[1] == 2
    counts = job.counts()
    assert counts[: SAMPLES // 2].tolist() == ONCE[: SAMPLES // 2]
    assert np.sum(counts != 1.0) <= ROWS * mode.get("merge", 1)
    assert job.data["epochs"] == once(0)


def test_waiting_where_a_process_cannot_return_is_refused() -> None:
    with pytest.raises(StrategyError, match="'wait' with communication 'local_sgd'"):
        jf.DistributedStrategy(mode="collective", on_trainer_lost="wait", communication="local_sgd")


def shrink(step: TrainerStep, _state: Any, _folder: Path) -> None:
    assert step.shrink(training.COUNTED.name) == 0


def export(step: TrainerStep, _state: Any, folder: Path) -> None:
    step.export(training.COUNTED.name, folder)


def save(step: TrainerStep, state: Any, folder: Path) -> None:
    saves(folder, 4)(step, state, 4)


@pytest.mark.parametrize("operate", [save, shrink, export])
@pytest.mark.parametrize("mode", MODES)
def test_what_all_have_done_together_is_not_done_again(
    mode: str, operate: Callable[[TrainerStep, Any, Path], None], tmp_path: Path
) -> None:
    """Server 0 is lost with a trainer, and has no answer for an operation that it forgot."""
    job = job_of(mode, folder=tmp_path / "own", returns_s=30.0)
    lost = False

    def between(step: TrainerStep, state: Any, done: int) -> Any:
        if done == 4:
            operate(step, state, tmp_path / "saved")
        return state

    def look(trainer: int, _server: int, message: Message) -> None:
        nonlocal lost
        if not lost and trainer == 1 and message.kind is Kind.PUSH and message.step >= 6:
            lost = True
            job.kill_server(0, away_s=0.5)
            kill(AWAY_S)

    job.between, job.on_send = between, look
    job.run()
    assert (job.starts, job.lives[1]) == ([2, 1], 2)
    check_counts(job, mode)
