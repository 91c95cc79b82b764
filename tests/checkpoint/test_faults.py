"""After the death of a saving process, or on a full disk, the older checkpoint remains."""

import errno
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint import CheckpointSeries, PartReceipt, commit, open_checkpoint, save_arrays
from jaxfleet.errors import CheckpointError
from tests.tiers import by_default

SAVER = str(Path(__file__).with_name("saver.py"))
ROOT = Path(__file__).parents[2]
W = np.ones((300, 4), np.float32)


@contextmanager
def saver(root: Path, how: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, SAVER, str(root), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], object], within_s: float = 30) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it never came"


@pytest.mark.processes
@pytest.mark.parametrize("delay_s", by_default([0.0, 0.02, 0.05], 0.02))
def test_a_process_killed_in_a_save_leaves_the_last_checkpoint(
    tmp_path: Path, delay_s: float
) -> None:
    series = CheckpointSeries(tmp_path)
    with saver(tmp_path, "forever") as process:
        assert process.stdout is not None
        committed = int(process.stdout.readline())
        wait_for(lambda: list(series.path(committed + 1).glob("tmp-*/data/*")))
        time.sleep(delay_s)
    last = series.latest()
    assert last is not None
    assert last >= committed
    found = open_checkpoint(series.path(last))
    assert (found.step, int(found.read("step"))) == (last, last)
    assert (found.read("w") == last).all()
    save_arrays(series.path(last + 1), {"w": W}, step=last + 1)
    series.prune()
    assert not list(tmp_path.rglob("tmp-*"))


@pytest.mark.grid
@pytest.mark.processes
def test_a_process_killed_in_replacing_a_checkpoint_leaves_the_old_one(tmp_path: Path) -> None:
    with saver(tmp_path, "same_folder") as process:
        assert process.stdout is not None
        committed = int(process.stdout.readline())
        wait_for(lambda: list((tmp_path / "c").glob("tmp-*/data/*")))
    found = open_checkpoint(tmp_path / "c")
    assert found.step >= committed
    assert (found.read("w") == found.step).all()
    found.verify()
    save_arrays(tmp_path / "c", {"w": W}, step=99)
    assert len(list((tmp_path / "c").iterdir())) == 2


@pytest.mark.grid
@pytest.mark.processes
def test_several_processes_write_one_checkpoint_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        savers = [stack.enter_context(saver(tmp_path, f"part {number}")) for number in range(3)]
        said = [process.communicate(timeout=250)[0] for process in savers]
    receipts = [PartReceipt.from_plain(json.loads(line)) for line in said]
    commit(tmp_path, receipts, step=7)
    found = open_checkpoint(tmp_path)
    assert found.read("step") == 7
    assert (found.read("w")[:, 0] == 7 * np.arange(90)).all()
    assert found.read("w", 29, 61).shape == (32, 1024)


@pytest.mark.processes
def test_a_file_that_cannot_grow_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with saver(tmp_path, "without_room") as process:
        said = process.communicate(timeout=250)[0]
    assert "cannot write part 'all' of step 2 to" in said
    assert f": File too large\n{errno.EFBIG}\n" in said
    assert "older checkpoints are as they were" in said
    series = CheckpointSeries(tmp_path)
    assert series.latest() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "where",
    [
        "jaxfleet.checkpoint.files.sync_tree",
        "jaxfleet.checkpoint.saving.write_sealed",
        "jaxfleet.checkpoint.array_store.DataWriter.close",
        "jaxfleet.checkpoint.files.os.fsync",
    ],
)
def test_a_full_disk_is_named_wherever_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    save_arrays(tmp_path / "c", {"w": W}, step=1)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(where, full)
        for folder in (tmp_path / "c", tmp_path / "d"):
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                save_arrays(folder, {"w": -W}, step=2)
            assert caught.value.errno == errno.ENOSPC
            assert str(folder) in str(caught.value)
            assert "MB are free" in caught.value.__notes__[0]
    assert sorted(tmp_path.rglob("*")) == before
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "c").read("w"), W)


def test_a_manifest_on_a_full_disk_is_not_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the very end: the new manifest is written, but cannot be renamed."""
    save_arrays(tmp_path / "c", {"w": W}, step=1)
    before = sorted(tmp_path.rglob("*"))
    rename: Any = Path.replace

    def broken(path: Path, target: Path) -> Any:
        return full() if target.name == "checkpoint.json" else rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", broken)
        with pytest.raises(CheckpointError, match="the list of parts of step 2"):
            save_arrays(tmp_path / "c", {"w": -W}, step=2)
    assert sorted(tmp_path.rglob("*")) == before
    assert open_checkpoint(tmp_path / "c").step == 1


def fails_at(call: int, function: Callable[[int], None]) -> Callable[[int], None]:
    calls = itertools.count()
    return lambda file: full() if next(calls) == call else function(file)


def test_wherever_a_save_fails_one_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync
    for failing in range(100):
        save_arrays(tmp_path / "c", {"w": W}, step=1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fails_at(failing, sync))
            try:
                save_arrays(tmp_path / "c", {"w": -W}, step=2)
            except CheckpointError:
                pass
            else:
                break
        found = open_checkpoint(tmp_path / "c")
        np.testing.assert_array_equal(found.read("w"), W if found.step == 1 else -W)
    assert failing > 8


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            save_arrays(tmp_path / "c", {"w": W}, step=1)
    finally:
        tmp_path.chmod(0o700)
