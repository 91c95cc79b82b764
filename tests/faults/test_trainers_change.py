"""Jobs whose trainers leave, are lost and join train as one device does."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.env import PserverRole
from jaxfleet.errors import FeedError, PeerLostError, ProgramError, StrategyError
from jaxfleet.runtime.pserver_entry import job_step
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.messages import Kind, Message
from tests.faults import training
from tests.faults.changing_jobs import ChangingJob, changes, leave_all_but_one_of_four
from tests.faults.cluster import check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_jobs import forget_killed, kill, kill_before
from tests.faults.memory_training import captured
from tests.tiers import by_default

STEPS = 8
TOLERANCE = 2e-6  # relative to the largest value of a leaf; float32 sums in another order
CLUSTER = PserverRole("trainer", 2, ("127.0.0.1:1",), trainer_id=0)
KINDS = ("plain", "clip", "clip_after", "clip_twice", "norm", "keys")


def changing(kind: str, *options: str, on_lost: str = "fail", **more: Any) -> ChangingJob:
    words = [f"--kind={kind}", f"--steps={STEPS}", "--pause=0.15", "--step-timeout=30"]
    words += [f"--on-lost={on_lost}", *options]
    return ChangingJob(options=words, step_s=30.0, **more)


def check_close(
    job: ChangingJob, undisturbed: Undisturbed, *, trainers: int, steps: int = STEPS
) -> None:
    """Checks that trainers agree bit for bit, and with one device within the tolerance."""
    kind, states = job.args.kind, job.survivors()
    expected = undisturbed(kind, steps)
    assert len(states) == trainers
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(value, states[0][name])
            if kind == "norm" and ("'b'" in name or name == "[2][0]"):
                continue  # its gradient is rounding, which Adam turns into full steps
            scale = float(np.max(np.abs(expected[name]), initial=1e-3))
            np.testing.assert_allclose(
                value, expected[name], rtol=0, atol=TOLERANCE * scale, err_msg=name
            )


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", by_default(KINDS, "norm"))
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_that_leaves_changes_nothing(
    kind: str, trainer: int, undisturbed: Undisturbed
) -> None:
    job = changing(kind)
    job.run({(trainer, 3): partial(leave, job, trainer)})
    check_close(job, undisturbed, trainers=1)
    assert job.counts() == [2, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", by_default(KINDS, "clip", "norm"))
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_job_goes_on_without_a_lost_trainer(
    kind: str, trainer: int, undisturbed: Undisturbed
) -> None:
    job = changing(kind, on_lost="continue")
    job.run({(trainer, 3): kill})
    assert forget_killed(job) == 1
    check_close(job, undisturbed, trainers=1)
    assert job.counts() == [2, 2, 2, 1, 1, 1, 1, 1]


def leave(job: ChangingJob, process: int) -> None:
    job.steps[process].leave()


@pytest.mark.few(1)
@pytest.mark.parametrize("number", by_default(range(7, 75, 12), 19, 31))
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("kind", by_default(KINDS, "clip_after"))
def test_a_trainer_lost_at_any_message_changes_nothing(
    kind: str, trainer: int, number: int, undisturbed: Undisturbed
) -> None:
    job = changing(kind, on_lost="continue")
    kill_before(job, trainer, number)
    job.run()
    check_close(job, undisturbed, trainers=2 - forget_killed(job))


@pytest.mark.parametrize("kind", by_default(KINDS, "clip"))
def test_processes_that_join_change_nothing(kind: str, undisturbed: Undisturbed) -> None:
    job = changing(kind, joins_at_s=(0.4, 0.4))
    job.run()
    check_close(job, undisturbed, trainers=4)
    assert job.counts()[0] == 2
    assert job.counts()[-1] == 4


@pytest.mark.usefixtures("twelve_rows")
@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_two_then_four_then_one_then_three_trainers_are_as_one_device(
    kind: str, undisturbed: Undisturbed
) -> None:
    steps = 26
    job = changing(kind, f"--steps={steps}", joins_at_s=(0.2, 0.2, 3.2, 3.2))
    leave_all_but_one_of_four(job)
    job.run()
    assert changes(job.counts()) == [2, 4, 1, 3]
    check_close(job, undisturbed, trainers=3, steps=steps)


def test_a_process_that_joins_with_another_script_changes_nothing(
    undisturbed: Undisturbed,
) -> None:
    job = changing("plain", joins_at_s=(0.4,))
    job.joining_kind = "clip"
    job.run()
    text = job.error("trainer 2", ProgramError)
    assert "it has another program for 2 trainers than those of the job" in text
    del job.ends["trainer 2"]
    check_close(job, undisturbed, trainers=2)


@pytest.mark.grid
@pytest.mark.usefixtures("twelve_rows")
def test_a_process_that_joins_with_a_state_of_its_own_leaves_again(
    undisturbed: Undisturbed,
) -> None:
    job = changing("plain", joins_at_s=(0.4,))
    job.joins_by_resume = False
    job.run()
    text = job.error("trainer 2", FeedError)
    assert "this process joins a job after step" in text
    del job.ends["trainer 2"]
    check_close(job, undisturbed, trainers=2)


def test_a_process_does_not_join_a_job_whose_trainers_are_fixed(undisturbed: Undisturbed) -> None:
    job = changing("plain", on_lost="wait", joins_at_s=(0.4,))
    job.run()
    text = job.error("trainer 2", ProgramError)
    assert "no trainer can join: with on_trainer_lost='wait' lost trainers are waited for" in text
    del job.ends["trainer 2"]
    check_close(job, undisturbed, trainers=2)


def test_the_last_trainer_does_not_leave(undisturbed: Undisturbed) -> None:
    job = changing("plain", trainers=1, servers=2)
    job.run({(0, 3): partial(leave, job, 0)})
    assert "trainer 0 is the last trainer" in job.error("trainer 0", ProgramError)


@pytest.mark.grid
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_sigterm_lets_a_trainer_leave_and_ends_the_last_one(
    trainers: int, undisturbed: Undisturbed
) -> None:
    job = changing("plain", on_lost="continue", trainers=trainers)

    def notify() -> None:  # as the handler of the signal does, in a thread that can have none
        request = job.steps[0]._leaving  # noqa: SLF001
        request.is_made = request.by_signal = True
        request.end = kill

    job.run({(0, 3): notify})
    assert forget_killed(job) == (trainers == 1)
    if trainers > 1:
        check_close(job, undisturbed, trainers=1)
        assert job.counts() == [2, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.grid
def test_a_trainer_that_was_only_silent_is_told_that_it_was_taken_out(
    undisturbed: Undisturbed,
) -> None:
    job = changing("plain", "--steps=80", on_lost="continue")
    job.run({(1, 3): lambda: job.stop("trainer 1", 7.0)})
    text = job.error("trainer 1", PeerLostError)
    assert "trainer 1 was taken out of the job after step 3: it had been silent" in text
    del job.ends["trainer 1"]
    check_close(job, undisturbed, trainers=1, steps=80)


@pytest.mark.grid
def test_a_trainer_lost_in_a_save_leaves_the_whole_checkpoint(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = changing("clip", on_lost="continue")
    is_saving = [False, False]

    def between(step: TrainerStep, state: Any, done: int) -> Any:
        if done == 3:
            is_saving[step.client.me.trainer] = True
            step.save(tmp_path / "saved", state)
            is_saving[0] = is_saving[1] = False
        return state

    def look(trainer: int, _server: int, _message: Message) -> None:
        if trainer == 1 and is_saving[1]:
            kill()

    job.between, job.on_send = between, look
    job.run()
    assert forget_killed(job) == 1
    check_close(job, undisturbed, trainers=1)
    example = training.start("clip"), next(training.batches(1))
    single: Any = jf.distribute(training.make_step("clip"), example, "single")
    check_same([training.named(single.restore(tmp_path / "saved"))], undisturbed("clip", 3))


@pytest.mark.grid
@pytest.mark.usefixtures("twelve_rows")
@pytest.mark.parametrize("number", range(1, 14))
def test_a_trainer_lost_while_another_joins_changes_nothing(
    number: int, undisturbed: Undisturbed
) -> None:
    job = changing("clip", on_lost="continue", joins_at_s=(0.4, 0.4))
    sent = 0

    def look(trainer: int, _server: int, message: Message) -> None:
        nonlocal sent
        if trainer == 1 and (sent or message.kind is Kind.MEMBERS or message.body.get("epoch")):
            sent += 1
            if sent == number:
                kill()

    job.on_send = look
    job.run()
    lost = forget_killed(job)
    assert lost == 1
    assert len(job.survivors()) in {2, 4 - lost}
    check_close(job, undisturbed, trainers=len(job.survivors()))


@pytest.mark.grid
@pytest.mark.usefixtures("twelve_rows")
@pytest.mark.parametrize("number", range(1, 10))
def test_a_process_lost_while_it_joins_changes_nothing(
    number: int, undisturbed: Undisturbed
) -> None:
    job = changing("clip", on_lost="continue", joins_at_s=(0.4, 0.4))
    kill_before(job, 2, number)
    job.run()
    assert forget_killed(job) == 1
    check_close(job, undisturbed, trainers=len(job.survivors()))


@pytest.mark.grid
def test_a_server_killed_after_a_change_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = changing("clip", "--steps=16", folder=tmp_path, returns_s=30.0)
    job.run(
        {
            (1, 3): partial(leave, job, 1),
            (0, 10): partial(job.kill_server, 1, away_s=1.0),
            (0, 12): partial(job.kill_server, 0, away_s=1.0),
        }
    )
    assert job.starts == [2, 2]
    check_close(job, undisturbed, trainers=1, steps=16)


def test_continue_is_refused_where_trainers_are_fixed() -> None:
    with pytest.raises(StrategyError, match="'continue' with communication 'fl'"):
        jf.DistributedStrategy(mode="pserver", on_trainer_lost="continue", communication="fl")
    strategy = jf.DistributedStrategy(mode="pserver", on_trainer_lost="continue", batch="local")
    with pytest.raises(StrategyError, match="'continue': with batch='local'"):
        job_step(captured("plain"), strategy, None, CLUSTER)


@pytest.mark.grid
def test_a_lost_trainer_that_is_started_again_is_told_to_join(undisturbed: Undisturbed) -> None:
    job = changing("plain", "--steps=80", on_lost="continue")
    job.run({(1, 3): lambda: kill(5.0) if job.lives[1] == 1 else None})
    assert "trainer 1 goes on with other trainers" in job.error("trainer 1", PeerLostError)
    del job.ends["trainer 1"]
    check_close(job, undisturbed, trainers=1, steps=80)
