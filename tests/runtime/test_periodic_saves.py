"""Checkpoints that a step writes by itself: when, how many, and what a failure does."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.checkpoint import CheckpointSeries, open_checkpoint, save_arrays
from jaxfleet.env import (
    PeriodicSaves,
    SaveInterval,
    periodic_saves_environment,
    read_periodic_saves,
)
from jaxfleet.errors import CheckpointError, StrategyError
from jaxfleet.runtime import periodic_saves
from jaxfleet.runtime.periodic_saves import PeriodicSaver
from jaxfleet.runtime.rank_step import RankStep


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, state: Any, done: int) -> None:
    save_arrays(path, {"w": np.full(2, state)}, step=done)


def saver(
    folder: Path,
    every: str,
    *,
    keep: int = 2,
    save: Callable[[Path, Any, int], None] = write,
    agree: Callable[[str, int, Exception | None], int] = lambda _, number, __: number,
    first: bool = True,
    clock: Callable[[], float] = lambda: 0.0,
) -> PeriodicSaver:
    saves = PeriodicSaves(folder, SaveInterval.parse(every), keep)
    return PeriodicSaver(saves, "step", save=save, agree=agree, is_first=lambda: first, clock=clock)


def steps(folder: Path) -> tuple[int, ...]:
    return CheckpointSeries(folder / "step").steps()


def test_the_last_few_checkpoints_are_kept(tmp_path: Path) -> None:
    own = saver(tmp_path, "3steps")
    for step in range(1, 14):
        own.after_step(float(step))
    assert steps(tmp_path) == (9, 12)
    assert own.count == 4
    assert own.newest() is None  # it has run steps
    again = saver(tmp_path, "3steps")
    assert again.newest() == (tmp_path / "step" / "step-00000012", 12)
    assert open_checkpoint(tmp_path / "step" / "step-00000012").read("w").tolist() == [12.0] * 2


def test_the_first_process_decides_by_its_clock(tmp_path: Path) -> None:
    clock, asked = Clock(), list[str]()

    def agree(what: str, number: int, _: Exception | None) -> int:
        asked.append(what)
        return number

    own = saver(tmp_path, "10s", agree=agree, clock=clock)
    for step in range(1, 33):
        clock.now = step * 1.0
        own.after_step(0.0)
    assert steps(tmp_path) == (12, 24)
    assert len(asked) == 8  # every fourth step
    late = saver(tmp_path, "1s", first=False, agree=lambda _, __, ___: 0, clock=clock)
    for _ in range(8):
        clock.now += 9.0
        late.after_step(0.0)
    assert late.count == 0


def test_the_steps_that_agree_follow_from_the_number_of_the_step_alone(tmp_path: Path) -> None:
    asked: list[int] = []

    def agree(_: str, number: int, __: Exception | None) -> int:
        asked.append(own.done)
        return number

    own = saver(tmp_path, "1h", agree=agree)
    own.resume(101)
    for _ in range(8):
        own.after_step(0.0)
    assert asked == [104, 108]


def test_a_save_that_fails_leaves_the_one_before_and_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, state: Any, done: int) -> None:
        if done == 4:
            raise CheckpointError("no space left")
        write(path, state, done)

    own = saver(tmp_path, "2steps", save=full)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            own.after_step(float(step))
    assert steps(tmp_path) == (2,)
    assert "the periodic checkpoint after step 4 failed: no space left" in caplog.text
    own.after_step(6.0)
    assert steps(tmp_path) == (2, 6)


@pytest.mark.parametrize(
    ("method", "said"),
    [("prune", "old checkpoints in"), ("remove_after", "checkpoints of an earlier run")],
)
def test_a_good_save_whose_predecessors_cannot_be_removed_is_good(
    method: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only folder")

    write(tmp_path / "step" / "step-00000060", 0.0, 60)
    monkeypatch.setattr(CheckpointSeries, method, refuse)
    own = saver(tmp_path, "2steps", keep=1)
    with caplog.at_level(logging.INFO):
        for step in range(2):
            own.after_step(float(step))
    assert own.count == 1
    assert 2 in steps(tmp_path)
    assert "checkpoint 1 of the job, after step 2" in caplog.text
    assert said in caplog.text
    assert "read-only folder" in caplog.text
    assert "failed" not in caplog.text


def test_a_folder_that_the_first_process_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    told: list[Exception | None] = []

    def agree(_: str, number: int, error: Exception | None) -> int:
        told.append(error)
        if error is not None:
            raise error
        return number

    (tmp_path / "step").write_text("a file")
    with pytest.raises(CheckpointError, match=r"the periodic checkpoints in .* cannot be read"):
        saver(tmp_path, "2steps", agree=agree).newest()
    assert isinstance(told[0], CheckpointError)


def test_ranks_have_the_reason_why_rank_0_finds_no_checkpoint() -> None:
    sent: list[str] = []

    class Told(RankStep[Any, Any]):
        def __init__(self) -> None:
            """Joins no group."""

        def _tell(self, what: str, said: str) -> list[str]:
            del what
            sent.append(said)
            return sent[:1]

        def number(self, number: int, error: Exception | None) -> int:
            return self._agreed_number("find it", number, error)

    first, other = Told(), Told()
    with pytest.raises(CheckpointError, match=r"^a disk is gone$"):
        first.number(0, CheckpointError("a disk is gone"))
    with pytest.raises(CheckpointError, match="rank 0 could not find it: a disk is gone"):
        other.number(0, None)
    sent.clear()
    assert first.number(12, None) == 12
    assert other.number(0, None) == 12


def test_checkpoints_of_a_run_that_was_not_resumed_are_removed(tmp_path: Path) -> None:
    for step in (50, 60):
        write(tmp_path / "step" / f"step-{step:08d}", 0.0, step)
    own = saver(tmp_path, "5steps")
    for _ in range(5):
        own.after_step(1.0)
    assert steps(tmp_path) == (5,)


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = saver(tmp_path, "1steps")
    assert own.newest() is None
    for step in range(2):
        own.after_step(float(step))
    (damaged,) = (tmp_path / "step" / "step-00000002").glob("part-*/part.json")
    damaged.write_text("{}")
    again = saver(tmp_path, "1steps")
    assert again.newest() == (tmp_path / "step" / "step-00000001", 1)
    assert "step 2 is passed over" in caplog.text
    other = saver(tmp_path, "1steps", first=False, agree=lambda _, __, ___: 2)
    assert other.newest() == (tmp_path / "step" / "step-00000001", 1)  # the first one's word


@pytest.mark.parametrize(
    ("text", "found"),
    [("300s", (300.0, None)), ("5m", (300.0, None)), ("1.5h", (5400.0, None)),
     ("100steps", (None, 100)), ("1step", (None, 1))],
)  # fmt: skip
def test_an_interval_is_read(text: str, found: tuple[float | None, int | None]) -> None:
    interval = SaveInterval.parse(text)
    assert (interval.seconds, interval.steps) == found
    assert SaveInterval.parse(str(interval)) == interval


@pytest.mark.parametrize("text", ["", "5", "0s", "-3s", "2.5steps", "1d", "s", "0steps"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match=r"steps|interval"):
        SaveInterval.parse(text)


def test_the_environment_carries_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_periodic_saves() is None
    assert periodic_saves_environment(None) == {}
    saves = PeriodicSaves(tmp_path, SaveInterval(steps=7), 4)
    for name, value in periodic_saves_environment(saves).items():
        monkeypatch.setenv(name, value)
    assert read_periodic_saves() == saves
    monkeypatch.delenv("JAXFLEET_SAVE_TO")
    with pytest.raises(StrategyError, match="JAXFLEET_SAVE_TO is not set"):
        read_periodic_saves()


def add(total: Any, batch: Any) -> tuple[Any, Any]:
    return total + batch.sum(0), {}


def begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process make steps as one that has none yet."""
    monkeypatch.setattr(periodic_saves, "_reserved", set())


def test_a_second_step_of_one_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = PeriodicSaves(tmp_path, SaveInterval(steps=2), 2)
    rank = {"PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:7001", "PADDLE_TRAINER_ID": "0"}
    for name, value in {**periodic_saves_environment(saves), **rank}.items():
        monkeypatch.setenv(name, value)
    example = (jnp.zeros(2), jnp.ones((4, 2)))
    jf.distribute(add, example=example, strategy="single")
    with pytest.raises(StrategyError, match="two steps are named 'add'") as caught:
        jf.distribute(add, example=example, strategy="single")
    assert "name=..." in str(caught.value.hint)
    jf.distribute(add, example=example, strategy="single", name="other")


def test_a_step_of_a_launched_process_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = PeriodicSaves(tmp_path, SaveInterval(steps=2), 2)
    rank = {"PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:7001", "PADDLE_TRAINER_ID": "0"}
    for name, value in {**periodic_saves_environment(saves), **rank}.items():
        monkeypatch.setenv(name, value)
    batch = jnp.ones((4, 2))
    step = jf.distribute(add, example=(jnp.zeros(2), batch), strategy="single")
    state: Any = jnp.zeros(2)
    for _ in range(7):
        state, _ = step(state, batch)
    series = CheckpointSeries(tmp_path / "add")
    assert series.steps() == (4, 6)
    begin_again(monkeypatch)
    other = jf.distribute(add, example=(jnp.zeros(2), batch), strategy="single")
    state = other.restore(series.path(6))
    np.testing.assert_array_equal(state, np.full(2, 24.0, np.float32))
    for _ in range(2):
        state, _ = other(state, batch)
    assert series.steps() == (6, 8)  # counted on from the restored one
    begin_again(monkeypatch)
    third = jf.distribute(add, example=(jnp.zeros(2), batch), strategy="single")
    state, done = third.resume(jnp.zeros(2))
    assert done == 8
    np.testing.assert_array_equal(state, np.full(2, 32.0, np.float32))
    for _ in range(2):
        state, _ = third(state, batch)
    assert third.resume(state) == (state, 0)  # it has begun
    assert series.steps() == (8, 10)


def add_both(total: Any, count: Any, x: Any) -> tuple[Any, Any, Any]:
    return total + x.sum(0), count + 1, x.max()


def test_a_step_of_several_arguments_resumes_all_of_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = PeriodicSaves(tmp_path, SaveInterval(steps=2))
    rank = {"PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:7001", "PADDLE_TRAINER_ID": "0"}
    for name, value in {**periodic_saves_environment(saves), **rank}.items():
        monkeypatch.setenv(name, value)
    x, first = jnp.ones((4, 2)), (jnp.zeros(2), jnp.int32(0))
    step: Any = jf.distribute(add_both, example=(*first, x), strategy="single")
    (total, count), done = step.resume(first)
    assert done == 0
    for _ in range(3):
        total, count, _ = step(total, count, x)
    begin_again(monkeypatch)
    again: Any = jf.distribute(add_both, example=(*first, x), strategy="single")
    (total, count), done = again.resume(first)
    assert (done, int(count), total.tolist()) == (2, 2, [8.0, 8.0])


def test_one_of_several_processes_alone_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = PeriodicSaves(tmp_path / "saved", SaveInterval(steps=1))
    ranks = {
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:7001,127.0.0.1:7002",
        "PADDLE_TRAINER_ID": "1",
    }
    for name, value in {**periodic_saves_environment(saves), **ranks}.items():
        monkeypatch.setenv(name, value)
    batch = jnp.ones((4, 2))
    step = jf.distribute(add, example=(jnp.zeros(2), batch), strategy="single")
    step(jnp.zeros(2), batch)
    assert not (tmp_path / "saved").exists()
