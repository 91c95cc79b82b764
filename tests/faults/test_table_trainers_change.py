"""Jobs with tables whose trainers leave, are lost and join train as one device does, rows too."""

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.ps.server.server_table import ServerTable
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.messages import Kind, Message
from tests.faults import training
from tests.faults.changing_jobs import ChangingJob, changes, leave_all_but_one_of_four
from tests.faults.memory_jobs import forget_killed, kill, kill_before
from tests.faults.test_trainers_change import (
    STEPS,
    TOLERANCE,
    changing,
    leave,
)

pytestmark = pytest.mark.grid  # the default run has the simulation's schedules

KINDS = ("table", "count_rows")  # rows in a loss, and rows that count their updates
SPLIT = 37  # before this message of trainer 0 in a job of tables, servers are at different steps


@functools.cache
def on_one_device(kind: str, steps: int, rows: int) -> dict[str, np.ndarray]:
    step, state = started(kind, rows)
    for batch in training.batches(steps, kind, rows):
        state, _ = step(state, batch)
    return training.named(state) | training.rows_of(step, kind)


def started(kind: str, rows: int = 0) -> tuple[Any, Any]:
    state: Any = training.start(kind)
    example = state, next(training.batches(1, kind, rows))
    return jf.distribute(training.make_step(kind), example, "single"), state


def check_close(job: ChangingJob, *, trainers: int, steps: int = STEPS) -> None:
    """Checks that trainers agree bit for bit, and with one device within the tolerance."""
    kind, states = job.args.kind, job.survivors()
    expected = on_one_device(kind, steps, training.ROWS)
    assert len(states) == trainers
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(value, states[0][name])
            atol = TOLERANCE * float(np.max(np.abs(expected[name]), initial=1e-3))
            atol = 0.0 if kind == "count_rows" else atol
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_that_leaves_changes_no_row(kind: str, trainer: int) -> None:
    job = changing(kind)
    job.run({(trainer, 3): partial(leave, job, trainer)})
    check_close(job, trainers=1)
    assert job.counts() == [2, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("number", range(7, 130, 6))
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_lost_at_any_message_changes_no_row(kind: str, trainer: int, number: int) -> None:
    job = changing(kind, on_lost="continue")
    kill_before(job, trainer, number)
    job.run()
    check_close(job, trainers=2 - forget_killed(job))


def test_a_repeated_step_begins_with_the_rows_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, look_up = list[int](), ServerTable.look_up_again

    def look_up_again(table: ServerTable, keys: np.ndarray, step: int) -> np.ndarray:
        found.append(step)
        return look_up(table, keys, step)

    monkeypatch.setattr(ServerTable, "look_up_again", look_up_again)
    job = changing("table", on_lost="continue")
    kill_before(job, 0, SPLIT)
    job.run()
    forget_killed(job)
    check_close(job, trainers=1)
    assert found, "no server had the interrupted step: choose another message"


def test_no_trainer_ends_a_step_whose_rows_a_server_lacks() -> None:
    """Only the trainer that is lost could send them again."""
    endpoints = list[str]()

    def lose(endpoint: str, message: Message) -> int:
        is_it = message.kind is Kind.PUSH_ROWS and (message.sender, message.step) == (
            "trainer 1",
            4,
        )
        if is_it and not endpoints:
            endpoints.append(endpoint)
            return 0
        return 1

    job = changing("table", on_lost="continue", faults=lose)

    def look(trainer: int, _server: int, message: Message) -> None:
        if trainer == 1 and message.kind is Kind.PENDING:
            kill()

    job.on_send = look
    job.run()
    assert forget_killed(job) == 1
    check_close(job, trainers=1)
    assert job.counts() == [2, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.usefixtures("twelve_rows")
@pytest.mark.parametrize("kind", KINDS)
def test_two_then_four_then_one_then_three_trainers_are_as_one_device(kind: str) -> None:
    steps = 26
    job = changing(kind, f"--steps={steps}", joins_at_s=(0.2, 0.2, 3.2, 3.2))
    leave_all_but_one_of_four(job)
    job.run()
    assert changes(job.counts()) == [2, 4, 1, 3]
    check_close(job, trainers=3, steps=steps)


@pytest.mark.usefixtures("twelve_rows")
@pytest.mark.parametrize("number", range(1, 16, 2))
@pytest.mark.parametrize("process", [1, 2])
def test_a_process_lost_while_others_join_changes_no_row(process: int, number: int) -> None:
    job = changing("table", on_lost="continue", joins_at_s=(0.4, 0.4))
    sent = 0

    def look(trainer: int, _server: int, message: Message) -> None:
        nonlocal sent
        if trainer == process and (
            sent or message.kind is Kind.MEMBERS or message.body.get("epoch")
        ):
            sent += 1
            if sent == number:
                kill()

    job.on_send = look
    job.run()
    assert forget_killed(job) == 1
    check_close(job, trainers=len(job.survivors()))


@pytest.mark.usefixtures("twelve_rows")
def test_a_process_that_joins_looks_up_rows_of_the_step_before() -> None:
    """Its first look-up is outside of a step, which servers may have begun when it joined."""
    job, found = changing("table", joins_at_s=(0.4, 0.4)), list[tuple[int, np.ndarray]]()

    def on_resume(trainer: int, _state: Any, done: int) -> None:
        if trainer > 1:
            found.append((done, job.steps[trainer].look_up("users", training.IDS)))

    job.on_resume = on_resume
    job.run()
    check_close(job, trainers=4)
    assert len(found) == 2
    for done, rows in found:
        wanted = on_one_device("table", done, training.ROWS)["rows"]
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=TOLERANCE)


def accuracy(state: Any, batch: Any) -> jax.Array:
    """Returns a number that depends on parameters and rows."""
    params = state[0]
    rows = training.USERS(params["users"], batch["ids"])
    return rows.sum() + params["a"].sum()


Operation = Callable[[Any, Any, Path], Any]
OPERATIONS: dict[str, Operation] = {
    "evaluate": lambda step, state, _: step.evaluate(
        accuracy, state, next(training.batches(1, "table"))
    ),
    "look_up": lambda step, _state, _: step.look_up("users", training.IDS),
    "shrink": lambda step, _state, _: step.shrink("users"),
    "export": lambda step, _state, folder: step.export("users", folder / "exported"),
    "save": lambda step, state, folder: step.save(folder / "saved", state) or 0,
}


class InterruptedJob:
    """A job whose trainers do an operation after step 3, in which one of them may be killed.

    Attributes:
        results: what the operation returned to the trainers that were not to be killed.
        rows: that they looked up after it.
        tokens: of requests to shrink.
    """

    def __init__(self, operation: Operation, trainer: int, number: int, folder: Path) -> None:
        self.job = changing("table", on_lost="continue")
        self.job.between, self.job.on_send = self._between, self._look
        self.operation, self.trainer, self.number = operation, trainer, number
        self.folder, self.tokens = folder, set[Any]()
        self.results, self.rows = list[Any](), list[np.ndarray]()
        self._is_busy, self._sent = False, 0

    def _between(self, step: TrainerStep, state: Any, done: int) -> Any:
        is_victim = step is self.job.steps[self.trainer]
        if done == 3:
            self._is_busy |= is_victim
            found = self.operation(step, state, self.folder)
            self._is_busy &= not is_victim
            self.results += [] if is_victim else [found]
            rows = step.look_up("users", training.IDS)
            self.rows += [] if is_victim else [rows]
        return state

    def _look(self, process: int, _server: int, message: Message) -> None:
        if message.kind is Kind.SHRINK:
            self.tokens.add(message.body["token"])
        if process == self.trainer and self._is_busy:
            self._sent += 1
            if self._sent == self.number:
                kill()


@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_a_lost_trainer_interrupts_is_done_once(
    name: str, trainer: int, number: int, tmp_path: Path
) -> None:
    """A trainer is killed before one of its messages of the operation, if it sends so many."""
    interrupted = InterruptedJob(OPERATIONS[name], trainer, number, tmp_path)
    interrupted.job.run()
    check_close(interrupted.job, trainers=2 - forget_killed(interrupted.job))
    assert len(interrupted.tokens) == (name == "shrink")
    step, state = started("table")
    for batch in training.batches(3, "table"):
        state, _ = step(state, batch)
    expected = OPERATIONS[name](step, state, tmp_path / "one device")
    for found in interrupted.results:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    wanted = step.look_up("users", training.IDS)
    for rows in interrupted.rows:
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_lost_in_a_save_leaves_a_checkpoint_with_all_rows(
    trainer: int, tmp_path: Path
) -> None:
    interrupted = InterruptedJob(OPERATIONS["save"], trainer, 1, tmp_path)
    interrupted.job.run()
    assert forget_killed(interrupted.job) == 1
    step, _ = started("table")
    found = training.named(step.restore(tmp_path / "saved")) | training.rows_of(step, "table")
    for name, wanted in on_one_device("table", 3, training.ROWS).items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-5, err_msg=name)
