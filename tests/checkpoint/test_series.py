"""The last valid checkpoint of a run is found, and only the last few stay."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.checkpoint import CheckpointSeries, Piece, open_checkpoint, save_arrays, write_part
from jaxfleet.errors import CheckpointError


def save(series: CheckpointSeries, *steps: int) -> None:
    for step in steps:
        save_arrays(series.path(step), {"w": np.full((3,), step)}, step=step)


def flip(folder: Path) -> None:
    """Flips a byte of the data, keeping their length."""
    path = max(folder.glob("part-*/data/d/*"), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    path.write_bytes(bytes(byte ^ 1 for byte in data))


def test_a_series_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path / "run")
    assert series.latest() is None
    assert series.steps() == ()
    series.prune()
    assert not (tmp_path / "run").exists()


def test_the_latest_is_the_last_step_and_not_the_last_written(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save(series, 9, 100_000_000, 10)
    assert series.latest() == 100_000_000
    assert series.steps() == (9, 10, 100_000_000)


def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save(series, 1, 2, 3)
    flip(series.path(3))
    shutil.rmtree(next(series.path(2).glob("part-*")))
    said: list[str] = []
    assert series.latest(warn=said.append) == 1
    assert [text[:33] for text in said] == [
        "the checkpoint of step 3 is passe",
        "the checkpoint of step 2 is passe",
    ]
    assert "part.json" in said[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert series.latest() == 1
    assert [str(warning.message) for warning in caught] == said
    assert {warning.filename for warning in caught} == {__file__}


def test_a_save_that_did_not_end_is_not_the_latest(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save(series, 1)
    write_part(series.path(2), "a", [Piece.whole("w", np.zeros(3))], step=2)
    assert series.latest() == 1


def test_pruning_keeps_the_last_few(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path, keep=2)
    save(series, 1, 2, 3, 4)
    series.prune()
    assert series.steps() == (3, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_pruning_counts_only_checkpoints_that_open(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path, keep=2)
    save(series, 1, 2, 3, 4)
    (series.path(3) / "checkpoint.json").write_text("{}")
    series.prune()
    assert series.steps() == (2, 3, 4)
    shutil.rmtree(series.path(2))
    (series.path(4) / "checkpoint.json").write_text("{}")
    series.prune()
    assert series.steps() == (3, 4)


def test_pruning_removes_what_broken_saves_left(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    for step in (1, 5):
        write_part(series.path(step), "a", [Piece.whole("w", np.zeros(3))], step=step)
    (tmp_path / "tmp-step-00000000-01234567").mkdir()
    (tmp_path / "notes.txt").write_text("")
    save(series, 2)
    series.prune()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "step-00000002", "step-00000005"]  # 5 may be in progress


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save(series, 1, 1)
    assert open_checkpoint(series.path(1)).read("w").tolist() == [1, 1, 1]


def test_a_series_keeps_one_at_least(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keeps 0"):
        CheckpointSeries(tmp_path, keep=0)
