"""Trainers of the relaxed modes leave, are lost and join: each sample counts once.

Every sample that trainers lease adds 1 to an element of its own, on server 0 and on server 1.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.env import PserverRole
from jaxfleet.errors import ProgramError, StrategyError
from jaxfleet.runtime.pserver_entry import job_step
from tests.faults.memory_jobs import forget_killed, kill, kill_before
from tests.faults.memory_leases import SAMPLES, LeasingJob, captured
from tests.tiers import by_default

ONCE = [1.0] * SAMPLES
MODES: dict[str, dict[str, Any]] = {
    "async": {"merge": 2, "staleness": 3},
    "half_async": {"merge": 2, "staleness": 3},
    "dc_asgd": {"delay_compensation": 0.0, "staleness": 2},
    "geo": {"k_steps": 2, "staleness": 3},
}
COUNTED = {"async", "dc_asgd"}  # half_async weighs gradients, and geo sends changes in parts


def changing(mode: str, *, on_lost: str = "fail", **more: Any) -> LeasingJob:
    strategy = {"communication": mode, **MODES[mode], "on_trainer_lost": on_lost}
    return LeasingJob(step_s=30.0, strategy=strategy, changes=True, **more)


def leave(job: LeasingJob, process: int) -> None:
    job.steps[process].leave()


def check_once(job: LeasingJob, mode: str) -> None:
    """Checks that all samples were trained on once, and values never older than the bound."""
    assert [(e["once"], e["twice"], e["never"]) for e in job.data["epochs"]] == [(SAMPLES, 0, 0)]
    ends = [end for end in job.ends.values() if end.state]
    assert ends
    for end in ends:
        staleness = end.stats["trainer"]["staleness"]
        assert staleness["max"] <= staleness["bound"]
    if mode in COUNTED:
        most = max((end.state["counts"] for end in ends), key=np.sum)
        assert most.tolist() == ONCE


def check_ends(job: LeasingJob) -> None:
    for name, end in job.ends.items():
        assert end.error is None, f"{name} ended with {end.error!r}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trainer", by_default([0, 1], 0))
def test_a_trainer_that_leaves_takes_no_sample_along(mode: str, trainer: int) -> None:
    job = changing(mode)
    job.run({(trainer, 3): partial(leave, job, trainer)})
    check_ends(job)
    check_once(job, mode)
    assert not job.ends[f"trainer {trainer}"].state
    assert job.numbers[1 - trainer][-1] == 1


@pytest.mark.parametrize("mode", by_default(MODES, "geo"))
def test_processes_that_join_share_the_samples(mode: str) -> None:
    job = changing(mode, joins_at_s=(0.3, 0.35))
    job.run()
    check_ends(job)
    check_once(job, mode)
    assert max(job.numbers[0]) > 2
    assert any(job.took[n] for n in (2, 3))


@pytest.mark.parametrize("mode", by_default(MODES, "async", "geo"))
@pytest.mark.parametrize("trainer", by_default([0, 1], 1))
def test_a_job_goes_on_without_a_lost_trainer(mode: str, trainer: int) -> None:
    job = changing(mode, on_lost="continue")
    job.run({(trainer, 3): kill})
    assert forget_killed(job) == 1
    check_ends(job)
    assert job.data["epochs"][0]["once"] == SAMPLES
    check_once(job, "half_async" if mode == "half_async" else "geo")  # see below for server 1
    assert job.numbers[1 - trainer][-1] == 1


@pytest.mark.grid
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("number", range(1, 60, 6))
def test_a_trainer_lost_at_any_message_costs_no_sample(
    mode: str, trainer: int, number: int
) -> None:
    job = changing(mode, on_lost="continue")
    kill_before(job, trainer, number)
    job.run()
    if not forget_killed(job):
        check_once(job, mode)
    elif any(end.state for end in job.ends.values()):  # the job had begun
        assert job.data["epochs"] == [{"epoch": 0, "once": SAMPLES, "twice": 0, "never": 0}]


def test_two_then_four_then_one_trainer_count_every_sample_once() -> None:
    job = changing("async", joins_at_s=(0.2, 0.2), samples=96)

    def after(trainer: int, number: int, step: Any, state: Any) -> Any:
        del number
        if step.client.me.trainers == 4 and trainer != 2:
            step.leave()
        return state

    job.after_step = after
    job.run()
    check_ends(job)
    assert job.data["epochs"] == [{"epoch": 0, "once": 96, "twice": 0, "never": 0}]
    (last,) = [end.state["counts"] for end in job.ends.values() if end.state]
    assert last.tolist() == [1.0] * 96
    assert job.numbers[2][-1] == 1


def test_a_save_that_a_change_interrupts_is_made_by_those_that_stay(tmp_path: Path) -> None:
    job = changing("async", pauses=(0.05, 0.3))
    path = tmp_path / "saved"

    def after(trainer: int, number: int, step: Any, state: Any) -> Any:
        if trainer == 1 and number == 2:
            step.leave()  # trainer 0 waits for it in its save
        if trainer == 0 and number == 3:
            step.save(path, state)
        return state

    job.after_step = after
    job.run()
    check_ends(job)
    check_once(job, "async")
    assert open_checkpoint(path).step == 3


def test_what_was_leased_before_a_change_is_void_after_a_restore(tmp_path: Path) -> None:
    job = changing("async")
    path = tmp_path / "saved"
    restored: list[int] = []

    def after(trainer: int, number: int, step: Any, state: Any) -> Any:
        if number == 2:
            step.save(path, state)
        if trainer == 1 and number == 4:
            step.leave()
        if trainer == 0 and step.client.me.trainers == 1 and not restored:
            restored.append(number)
            state = step.restore(path)
        return state

    job.after_step = after
    job.run()
    check_ends(job)
    assert restored
    check_once(job, "async")


def test_the_last_trainer_does_not_leave() -> None:
    job = changing("async", trainers=1)
    job.run({(0, 2): partial(leave, job, 0)})
    assert "trainer 0 is the last trainer" in job.error("trainer 0", ProgramError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"communication": "fl"}, "all trainers average their values"),
        ({"communication": "async"}, "they can with batch='local'"),
        (
            {"communication": "async", "batch": "local", "passes": "compress_sends"},
            "trainers keep what compressed gradients leave out",
        ),
    ],
)
def test_continue_is_refused_where_trainers_are_fixed(options: dict[str, Any], text: str) -> None:
    role = PserverRole("trainer", 2, ("127.0.0.1:1",), trainer_id=0)
    with pytest.raises(StrategyError) as caught:  # noqa: PT012  # either line may refuse
        strategy = jf.DistributedStrategy(mode="pserver", on_trainer_lost="continue", **options)
        job_step(captured(SAMPLES), strategy, None, role)
    assert text in str(caught.value) + str(caught.value.hint)
