"""Trainers that are killed and come back change nothing, whenever they are killed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import FeedError, PeerLostError
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind, Message
from tests.faults import training
from tests.faults.cluster import LOST_S, check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_jobs import End, KilledError, kill, kill_again
from tests.faults.memory_training import TrainingJob
from tests.tiers import by_default, grid

STEPS = 6
AWAY_S = 5.0  # longer than a trainer may be silent
WORDS = (f"--steps={STEPS}", "--pause=0.15", "--step-timeout=30", "--on-lost=wait")
KINDS = ("plain", "clip", "clip_after", "clip_twice", "norm", "keys", "table")


def waiting(kind: str, *options: str, **more: Any) -> TrainingJob:
    return TrainingJob(options=[f"--kind={kind}", *WORDS, *options], step_s=30.0, **more)


def kill_at(
    job: TrainingJob, trainer: int, matches: Callable[[int, Message], bool], *, away_s: float
) -> None:
    """Kills a trainer's first process before a message that matches, by server and message."""

    def look(number: int, server: int, message: Message) -> None:
        if number == trainer and job.lives[trainer] == 1 and matches(server, message):
            kill(away_s)

    job.on_send = look


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", by_default(KINDS, "clip_twice", "norm", "keys"))
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_killed_between_steps_changes_nothing(
    kind: str, trainer: int, undisturbed: Undisturbed
) -> None:
    job = waiting(kind)
    job.run({(trainer, 3): lambda: kill(AWAY_S) if job.lives[trainer] == 1 else None})
    assert job.lives[trainer] == 2
    check_same(job.results(), undisturbed(kind, STEPS))


MESSAGES = range(3, 48, 4)


def kill_before(job: TrainingJob, trainer: int, number: int, *, away_s: float) -> None:
    """Kills a trainer's first process before its nth message to any server, or its first bye."""
    sent = 0

    def counts(_server: int, message: Message) -> bool:
        nonlocal sent
        sent += 1
        is_first_bye = message.kind is Kind.BYE and sent < number
        sent = max(sent, number) if is_first_bye else sent
        return sent == number

    kill_at(job, trainer, counts, away_s=away_s)


Operations = Callable[[TrainerStep, Any, int], None]  # on a step, with its state and number


def kill_between_steps(
    job: TrainingJob, trainer: int, number: int, operate: Operations, *, after: int
) -> Callable[[], bool]:
    """Runs operations after steps, and kills a trainer's first process in those after one of them.

    It is killed before its nth message there; returns whether it has come to that.
    """
    sent, are_counted = 0, [False, False]

    def between(step: TrainerStep, state: Any, done: int) -> Any:
        me = step.client.me.trainer
        are_counted[me] = done == after
        operate(step, state, done)
        are_counted[me] = False
        return state

    def counts(_server: int, _message: Message) -> bool:
        nonlocal sent
        sent += are_counted[trainer]
        return are_counted[trainer] and sent == number

    kill_at(job, trainer, counts, away_s=AWAY_S)
    job.between = between
    return lambda: sent >= number


def saves(folder: Path, *steps: int) -> Operations:
    def operate(step: TrainerStep, state: Any, done: int) -> None:
        if done in steps:
            step.save(folder, state)  # twice at this step
            step.save(folder, state)
            step.pull(state)

    return operate


@pytest.mark.few(3)
@pytest.mark.parametrize("number", by_default(MESSAGES, 7, 11, 15, 19, 23, 27))
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("kind", by_default(["clip", "keys", "clip_twice", "norm"], "norm"))
def test_a_trainer_killed_at_any_message_changes_nothing(
    kind: str, trainer: int, number: int, undisturbed: Undisturbed
) -> None:
    job = waiting(kind)
    kill_before(job, trainer, number, away_s=AWAY_S)
    job.run()
    assert job.lives[trainer] == 2
    check_same(job.results(), undisturbed(kind, STEPS))


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(3, 48, 6))
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_of_a_job_with_a_table_killed_at_any_message_changes_nothing(
    trainer: int, number: int, undisturbed: Undisturbed
) -> None:
    job = waiting("table")
    kill_before(job, trainer, number, away_s=AWAY_S)
    job.run()
    assert job.lives[trainer] == 2
    check_same(job.results(), undisturbed("table", STEPS))


@pytest.mark.parametrize("trainer", [grid(0), 1])
def test_rows_of_the_step_before_that_a_server_lacks_are_taken_again(
    trainer: int, undisturbed: Undisturbed
) -> None:
    # A push of rows has no answer, and the trainer is a step further on the other server.
    job, resumed = waiting("table"), list[int]()

    def lose(endpoint: str, message: Message) -> int:
        is_lost = message.kind is Kind.PUSH_ROWS and message.step == 3
        is_lost &= message.sender == f"trainer {trainer}" and endpoint == job.endpoints[1]
        return 0 if is_lost and job.lives[trainer] == 1 else 1

    job.network = MemoryNetwork(faults=lose)
    job.on_resume = lambda number, _state, done: resumed.append(done) if number == trainer else None
    kill_at(job, trainer, lambda to, m: to == 1 and m.step == 4, away_s=AWAY_S)
    job.run()
    assert resumed == [0, 2]
    check_same(job.results(), undisturbed("table", STEPS))


@pytest.mark.grid
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("number", range(1, 12, 3))
def test_a_trainer_killed_in_operations_on_a_table_changes_nothing(
    trainer: int, number: int, undisturbed: Undisturbed
) -> None:
    job = waiting("table")
    rows: list[dict[int, np.ndarray]] = [{}, {}]
    keys, tokens = np.arange(-9, 9) << 40, set[str]()

    def operate(step: TrainerStep, _state: Any, done: int) -> None:
        if done == 3:
            step.shrink("users")
        rows[step.client.me.trainer][done] = step.look_up("users", keys)

    is_due = kill_between_steps(job, trainer, number, operate, after=3)
    look = job.on_send

    def note(sender: int, server: int, message: Message) -> None:
        if message.kind is Kind.SHRINK:
            tokens.add(str(message.body["token"]))
        look(sender, server, message)

    job.on_send = note
    job.run()
    assert job.lives[trainer] == 2 or not is_due()
    check_same(job.results(), undisturbed("table", STEPS))
    assert len(tokens) <= 1  # servers know the operation when it is done again
    for done in range(1, STEPS + 1):
        np.testing.assert_array_equal(rows[0][done], rows[1][done])


def test_a_returned_trainer_looks_up_the_rows_of_the_step_that_it_resumes() -> None:
    job, keys = waiting("table"), np.arange(-9, 9) << 40
    found: dict[int, np.ndarray] = {}

    def between(step: TrainerStep, state: Any, done: int) -> Any:
        if step.client.me.trainer == 0:
            found[done] = step.look_up("users", keys)
        return state

    def note(number: int, _state: Any, done: int) -> None:
        if number == 1 and done:
            looked = job.steps[1].look_up("users", keys)
            np.testing.assert_array_equal(looked, found[done])
            found[-1] = looked

    job.between, job.on_resume = between, note
    job.run({(1, 3): lambda: kill(AWAY_S) if job.lives[1] == 1 else None})
    job.results()
    assert -1 in found


@pytest.mark.few(2)
@pytest.mark.parametrize("number", by_default(MESSAGES, 15, 22))
def test_all_trainers_killed_at_once_change_nothing(number: int, undisturbed: Undisturbed) -> None:
    job = waiting("norm")
    sent = [0, 0]

    def look(trainer: int, _server: int, _message: Message) -> None:
        sent[trainer] += 1
        if job.lives[trainer] == 1 and max(sent) >= number:
            kill(AWAY_S + trainer)

    job.on_send = look
    job.run()
    assert job.lives == [2, 2]
    check_same(job.results(), undisturbed("norm", STEPS))


@pytest.mark.few(2)
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("away_s", [0.1, AWAY_S])
def test_a_trainer_killed_again_and_again_changes_nothing(
    trainer: int, away_s: float, undisturbed: Undisturbed
) -> None:
    # At the first message, while it returns, in the step that it computes again, and much later.
    # Back within 0.1 s, it is not lost yet.
    job, lives = waiting("norm"), (19, 3, 6, 9, 4, 20)
    kill_again(job, trainer, lives, away_s)
    job.run()
    assert job.lives[trainer] == len(lives) + 1
    check_same(job.results(), undisturbed("norm", STEPS))


@pytest.mark.parametrize(
    ("trainer", "which"),
    [(n, kind) for n in range(2) for kind in (Kind.PUSH, Kind.REDUCE, Kind.PULL)]
    + [(0, Kind.KEEP)],
)
def test_a_trainer_killed_before_what_each_server_receives_changes_nothing(
    trainer: int, which: Kind, undisturbed: Undisturbed
) -> None:
    # The first server has received it, the second has not.
    server = 1 if which in {Kind.PUSH, Kind.PULL} else None
    job = waiting("norm")

    def matches(to: int, message: Message) -> bool:
        return message.kind is which and message.step == 3 and server in {None, to}

    kill_at(job, trainer, matches, away_s=AWAY_S)
    job.run()
    assert job.lives[trainer] == 2
    check_same(job.results(), undisturbed("norm", STEPS))


@pytest.mark.grid
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("number", range(1, 8))
def test_a_trainer_killed_in_operations_between_steps_changes_nothing(
    trainer: int, number: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = waiting("norm")
    is_due = kill_between_steps(job, trainer, number, saves(tmp_path / "saved", 2, 3), after=3)
    job.run()
    assert job.lives[trainer] == 2 or not is_due()
    check_same(job.results(), undisturbed("norm", STEPS))
    example = training.start("norm"), next(training.batches(1))
    single: Any = jf.distribute(training.make_step("norm"), example, "single")
    check_same([training.named(single.restore(tmp_path / "saved"))], undisturbed("norm", 3))


@pytest.mark.grid
def test_a_server_killed_after_a_trainer_returned_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    words = ["--kind=norm", *WORDS, "--steps=14"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words)
    job.run(
        {
            (1, 3): lambda: kill(AWAY_S) if job.lives[1] == 1 else None,
            (0, 5): partial(job.kill_server, 0, away_s=1.0),
            (1, 8): partial(job.kill_server, 1, away_s=1.0),
            (0, 10): lambda: kill(AWAY_S) if job.lives[0] == 1 else None,
        }
    )
    assert (job.lives, job.starts) == ([2, 2], [2, 2])
    check_same(job.results(), undisturbed("norm", 14))


@pytest.mark.few(1)
@pytest.mark.parametrize("server", [0, 1])
def test_a_server_and_a_trainer_that_die_together_end_the_job_at_once(
    server: int, tmp_path: Path
) -> None:
    words = ["--kind=norm", *WORDS, "--steps=500"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words)

    def kill_both() -> None:
        job.kill_server(server, away_s=1.0)
        kill(2.0)

    job.run({(1, 20): kill_both})
    text = job.error("trainer 1", PeerLostError)
    assert f"trainer 1 cannot return: server {server} at" in text
    assert "started again too, from its checkpoint of step" in text
    assert "trainer 1 cannot return" in job.error("trainer 0", PeerLostError)
    assert job.ends["trainer 0"].at_s < job.ends["trainer 1"].at_s + 2.0


@pytest.mark.grid
def test_a_job_that_cannot_go_on_tells_trainers_so_however_often_they_are_started_again(
    tmp_path: Path,
) -> None:
    words = ["--kind=norm", *WORDS, "--steps=500"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words)
    train = job.train

    def train_again(trainer: int) -> End:
        try:
            return train(trainer)
        except PeerLostError:
            if job.lives[trainer] < 4:
                kill(1.0)
            raise

    def kill_both() -> None:
        if job.lives[1] == 1:
            job.kill_server(0, away_s=1.0)
            kill(2.0)

    job.train = train_again  # type: ignore[method-assign]
    job.run({(1, 20): kill_both})
    for trainer in range(2):
        assert "cannot return: server 0 at" in job.error(f"trainer {trainer}", PeerLostError)
        assert job.lives[trainer] == 4
        assert job.ends[f"trainer {trainer}"].at_s < 20.0


@pytest.mark.few(1)
@pytest.mark.parametrize("number", by_default(range(1, 15), 2, 5))
def test_a_trainer_killed_while_a_server_is_brought_level_is_never_waited_for_in_vain(
    number: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    words = ["--kind=norm", *WORDS, "--steps=14"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words)
    sent = 0

    def counts(server: int, _message: Message) -> bool:
        nonlocal sent
        sent += server == 0 and job.starts[0] == 2
        return server == 0 and sent == number

    kill_at(job, 1, counts, away_s=2.0)
    job.run({(0, 10): partial(job.kill_server, 0, away_s=1.0)})
    assert job.lives[1] == 2
    if job.ends["trainer 0"].error is None:
        check_same(job.results(), undisturbed("norm", 14))
        return
    for trainer in range(2):
        assert "cannot return: server 0 at" in job.error(f"trainer {trainer}", PeerLostError)
        assert job.ends[f"trainer {trainer}"].at_s < 20.0


def test_a_trainer_that_does_not_return_is_named_after_the_time_given() -> None:
    job = waiting("plain", "--steps=500", "--return-s=12").run({(1, 5): kill})
    job.error("trainer 1", KilledError)
    text = job.error("trainer 0", PeerLostError)
    assert text.startswith("trainer 1 is lost: silent for")
    waited_s = job.ends["trainer 0"].at_s - job.ends["trainer 1"].at_s
    assert LOST_S + 12.0 - 1.0 < waited_s < LOST_S + 12.0 + 1.5


def test_servers_report_whom_they_wait_for_and_how_long_still(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = waiting("plain", "--return-s=40")
    beats: list[str] = []

    def look(_endpoint: str, message: Message) -> int:
        if message.kind is Kind.HEARTBEAT and message.sender == "server 0":
            beats.append(str(message.body["doing"]))
        return 1

    job.network = MemoryNetwork(faults=look)
    job.run({(1, 3): lambda: kill(25.0) if job.lives[1] == 1 else None})
    job.results()
    assert any("waits 30 s more for trainer 1 to return" in beat for beat in beats)
    assert "trainer 1 to return" not in beats[-1]
    notices = [text for text in caplog.messages if "trainer 0 waits for trainer 1" in text]
    assert any("s more for trainer 1 to return" in text for text in notices)


def test_a_returned_trainer_that_begins_anew_is_told_to_resume() -> None:
    job = waiting("plain", "--return-s=12")
    job.resumes = False
    job.run({(1, 3): lambda: kill(AWAY_S) if job.lives[1] == 1 else None})
    text = job.error("trainer 1", FeedError)
    assert "trainer 1 returns to a job at step 3, and begins with a state of its own" in text
    notes = getattr(job.ends["trainer 1"].error, "__notes__", ())
    assert "state, done = step.resume(state)" in str(notes)


@pytest.mark.few(1)
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("at", [2, 3])
def test_leaves_that_the_script_replaces_between_steps_are_those_of_the_job(
    trainer: int, at: int
) -> None:
    def run(*kills: int) -> list[Any]:
        job = waiting("norm")

        def between(_: TrainerStep, state: Any, done: int) -> Any:
            params, opt, running = state
            if done == 2:
                params = {**params, "b": params["b"] * 0.5}
                state = params, opt, (running[0] + 1.0, running[1])
            return state

        job.between = between
        job.run(
            {(trainer, n): lambda: kill(AWAY_S) if job.lives[trainer] == 1 else None for n in kills}
        )
        return job.results()

    check_same(run(at), run()[0])


@pytest.mark.grid
def test_a_job_restored_from_a_checkpoint_goes_on_from_there(tmp_path: Path) -> None:
    TrainingJob(options=["--kind=norm", "--steps=4"], saved=tmp_path / "saved").run().results()

    def run(*kills: int) -> list[Any]:
        job = waiting("norm", restored=tmp_path / "saved")
        job.run({(0, n): lambda: kill(AWAY_S) if job.lives[0] == 1 else None for n in kills})
        return job.results()

    check_same(run(1), run()[0])
    check_same(run(3), run()[0])
