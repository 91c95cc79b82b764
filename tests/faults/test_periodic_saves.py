"""Trainers write checkpoints of their job by themselves, all at the same steps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jaxfleet as jf
from jaxfleet.checkpoint import CheckpointSeries, PartReceipt, write_part
from jaxfleet.env import PeriodicSaves, SaveInterval
from jaxfleet.errors import CheckpointError, StrategyError
from jaxfleet.ps.server import checkpoints
from jaxfleet.runtime import pserver_checkpoint
from jaxfleet.runtime.trainer_step import TrainerStep
from tests.faults import memory_training, training
from tests.faults.cluster import check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_training import TrainingJob
from tests.faults.test_trainers_return import AWAY_S, STEPS, kill_before, waiting


def saving(
    monkeypatch: pytest.MonkeyPatch, folder: Path, every: str, *, keep: int = 3
) -> CheckpointSeries:
    """Lets the steps of memory jobs save; returns their checkpoints."""
    saves = PeriodicSaves(folder, SaveInterval.parse(every), keep)

    class SavingStep(TrainerStep):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.save_periodically(saves)

    monkeypatch.setattr(memory_training, "TrainerStep", SavingStep)
    return CheckpointSeries(folder / "train_step", keep=keep)


def restored(path: Path, kind: str) -> Any:
    """Returns the state of a checkpoint, as one process restores it."""
    example = (training.start(kind), next(training.batches(1, kind)))
    step: Any = jf.distribute(training.make_step(kind), example=example, strategy="single")
    return training.named(step.restore(path))


@pytest.mark.few(1)
@pytest.mark.parametrize("every", ["3steps", "0.001s"])
def test_a_job_saves_itself_although_a_server_dies(
    every: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed
) -> None:
    series = saving(monkeypatch, tmp_path / "saved", every)
    options = ["--kind=norm", "--steps=10", "--step-timeout=30"]
    job = TrainingJob(tmp_path / "own", returns_s=30.0, step_s=30.0, options=options)
    kill = partial(job.kill_server, 1, away_s=1.0)
    job.run({(0, 2): kill, (1, 6): partial(job.kill_server, 0, away_s=1.0)})
    check_same(job.results(), undisturbed("norm", 10))
    assert series.steps() == ((3, 6, 9) if every == "3steps" else (4, 8))
    last = series.steps()[-1]
    check_same([restored(series.path(last), "norm")], undisturbed("norm", last))


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["norm", "clip", "table"])
def test_a_job_that_begins_again_goes_on_from_its_last_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed
) -> None:
    series = saving(monkeypatch, tmp_path / "saved", "2steps", keep=2)
    TrainingJob(options=[f"--kind={kind}", "--steps=5"]).run().results()
    assert series.steps() == (2, 4)
    ran: list[int] = []
    job = TrainingJob(options=[f"--kind={kind}", "--steps=7"])

    def note(_step: TrainerStep, state: Any, number: int) -> Any:
        ran.append(number)
        return state

    job.between = note
    check_same(job.run().results(), undisturbed(kind, 7))
    assert sorted(ran) == [5, 5, 6, 6, 7, 7]
    assert series.steps() == (4, 6)


def test_all_trainers_end_if_trainer_0_cannot_read_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving(monkeypatch, tmp_path / "saved", "2steps")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "train_step").write_text("a file")
    job = TrainingJob(options=["--kind=count", "--steps=2"]).run()
    assert "cannot be read" in job.error("trainer 0", CheckpointError)
    assert "trainer 0 could not find" in job.error("trainer 1", CheckpointError)


def test_training_goes_on_if_no_process_can_write_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed
) -> None:
    """Servers answer with their own errors after trainer 0's, with which the save fails."""
    series = saving(monkeypatch, tmp_path / "saved", "2steps")
    failed: list[str] = []

    def write(folder: Path, name: str, pieces: Any, *, step: int) -> PartReceipt:
        if step == 2:
            failed.append(name)
            raise CheckpointError("no space left")
        return write_part(folder, name, pieces, step=step)

    for module in (checkpoints, pserver_checkpoint):
        monkeypatch.setattr(module, "write_part", write)
    job = TrainingJob(options=["--kind=norm", "--steps=5"]).run()
    check_same(job.results(), undisturbed("norm", 5))
    assert sorted(failed) == ["server 0", "server 1", "trainers"]
    assert series.steps() == (4,)


@pytest.mark.grid
@pytest.mark.parametrize("every", ["2steps", "0.001s"])
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("number", range(11, 48, 6))
def test_a_trainer_that_returns_saves_with_the_others(
    *,
    number: int,
    trainer: int,
    every: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Undisturbed,
) -> None:
    series = saving(monkeypatch, tmp_path / "saved", every)
    job = waiting("norm")
    kill_before(job, trainer, number, away_s=AWAY_S)
    job.run()
    assert job.lives[trainer] == 2
    check_same(job.results(), undisturbed("norm", STEPS))
    assert series.steps() == ((2, 4, 6) if every == "2steps" else (4,))
    last = series.steps()[-1]
    check_same([restored(series.path(last), "norm")], undisturbed("norm", last))


def test_relaxed_trainers_save_at_numbers_of_steps_and_not_at_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--kind=count", "--communication=async", "--steps=6"]
    series = saving(monkeypatch, tmp_path / "saved", "2steps")
    job = TrainingJob(options=words).run()
    assert all(end.error is None for end in job.ends.values())
    assert series.steps() == (2, 4, 6)
    saving(monkeypatch, tmp_path / "saved", "5s")
    job = TrainingJob(options=words).run()
    assert "no step is that of all trainers" in job.error("trainer 0", StrategyError)


@pytest.mark.parametrize("communication", ["sync", "async"])
def test_numbers_go_on_from_a_checkpoint_that_the_script_restores(
    communication: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = saving(monkeypatch, tmp_path / "saved", "2steps")
    options = ["--kind=count", f"--communication={communication}", "--steps=6"]
    job = TrainingJob(options=options)

    def go_back(step: TrainerStep, state: Any, number: int) -> Any:
        return step.restore(series.path(2)) if number == 5 else state

    job.between = go_back
    job.run()
    assert all(end.error is None for end in job.ends.values())
    assert series.steps() == (2, 4)
