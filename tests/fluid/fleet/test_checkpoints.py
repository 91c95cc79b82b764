"""Numbered checkpoints of the collective fleet, here and on a remote file system."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import CheckpointError, UnsupportedError
from jaxfleet.fluid.incubate.fleet.collective import Collective, TrainStatus
from jaxfleet.fluid.incubate.fleet.utils.fs import BDFS, LocalFS
from tests.fluid.fleet.test_collective_fleet import TWO, fleet_of, minimized

NAME = "__paddle_fleet_checkpoint__"


class Elsewhere(LocalFS):
    """A file system that files are copied to and from: its paths have another prefix."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _at(self, path: str) -> str:
        assert path.startswith("far:"), f"{path} is not there"
        return str(self.root / path.removeprefix("far:"))

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        return super().ls_dir(self._at(fs_path))

    def mkdirs(self, fs_path: str) -> None:
        Path(self._at(fs_path)).mkdir(parents=True, exist_ok=True)

    def delete(self, fs_path: str) -> None:
        LocalFS().delete(self._at(fs_path))

    def mv(self, fs_src_path: str, fs_dst_path: str, overwrite: bool = False) -> None:
        LocalFS().mv(self._at(fs_src_path), self._at(fs_dst_path), overwrite)

    def need_upload_download(self) -> bool:
        return True

    def upload(self, local_path: str, fs_path: str) -> None:
        super().upload(local_path, self._at(fs_path))

    def download(self, fs_path: str, local_path: str) -> None:
        super().download(self._at(fs_path), local_path)


@pytest.fixture
def exe() -> Iterator[fluid.Executor]:
    """Yields an executor with its own scope."""
    with fluid.scope_guard(fluid.Scope()):
        yield fluid.Executor()


def begun(exe: fluid.Executor) -> Collective:
    fleet = fleet_of(TWO)
    minimized(fleet, use_local_sgd=True)  # which keeps more state than parameters
    exe.run(fleet.startup_program)
    return fleet


def set_weights(value: float) -> None:
    scope = fluid.global_scope()
    for name in ("w", "w@SNAPSHOT"):
        scope.var(name).get_tensor().set(np.full((4, 1), value, np.float32), fluid.CPUPlace())


def weights() -> list[float]:
    scope = fluid.global_scope()
    return [float(np.array(scope[name])[0, 0]) for name in ("w", "w@SNAPSHOT")]


def test_checkpoints_are_numbered_and_the_newest_is_loaded(
    exe: fluid.Executor, tmp_path: Path
) -> None:
    fleet, path, fs = begun(exe), str(tmp_path / "kept"), LocalFS()
    assert fleet.load_check_point(exe, path, trainer_id=0) is None
    with pytest.raises(AssertionError, match="Can't find checkpoint"):
        fleet.load_check_point(exe, path, trainer_id=0, ignore_empty=False)
    for number, value in enumerate((2.0, 3.0)):
        set_weights(value)
        fleet.save_check_point(exe, path, TrainStatus(number + 1), fs=fs)
        assert fleet._get_last_checkpoint_no(path, fs=fs) == number
    folder = tmp_path / "kept" / f"{NAME}.1"
    assert {p.name for p in folder.iterdir()} == {"_paddle_fleet_param__", "fleet_train_status"}
    assert (folder / "fleet_train_status").read_text() == '{"epoch_no": 2}'
    set_weights(0.0)
    status = fleet.load_check_point(exe, path, trainer_id=0, fs=fs)
    assert status == TrainStatus(2)
    assert status is not None
    assert status.next() == 3
    assert weights() == [3.0, 3.0]
    fleet.clean_redundant_check_points(path, fs)
    assert fs.list_dirs(path) == [f"{NAME}.1"]
    fleet.save_check_point(exe, path, TrainStatus(3), remain_all_checkpoint=False)
    assert fs.list_dirs(path) == [f"{NAME}.2"]
    second = fleet_of(TWO, 1)
    with pytest.warns(UserWarning, match="worker 1 writes no checkpoint: the first one does"):
        second.save_check_point(exe, path, TrainStatus(4), fleet.main_program)
    assert fs.list_dirs(path) == [f"{NAME}.2"]


def test_a_checkpoint_is_on_disk_under_its_final_name(
    exe: fluid.Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, root, seen = begun(exe), tmp_path / "new" / "kept", list[tuple[Path, list[str]]]()

    def noted(path: Path) -> None:
        seen.append((path, sorted(p.name for p in path.iterdir())))

    module = "jaxfleet.fluid.incubate.fleet.collective.checkpoints"
    monkeypatch.setattr(f"{module}.sync", noted)
    fleet.save_check_point(exe, str(root), TrainStatus(1), fs=LocalFS())
    assert seen == [(root, [f"{NAME}.0"])]


def test_a_save_that_was_cut_off_is_not_seen_and_in_nobodys_way(
    exe: fluid.Executor, tmp_path: Path
) -> None:
    fleet = begun(exe)
    set_weights(2.0)
    fleet.save_check_point(exe, str(tmp_path), TrainStatus(1))
    left = tmp_path / f"{NAME}.1.tmp"
    left.mkdir()
    (left / "rest").touch()
    assert fleet._get_last_checkpoint_no(str(tmp_path)) == 0
    set_weights(5.0)
    fleet.save_check_point(exe, str(tmp_path), TrainStatus(2))
    assert not left.exists()
    assert not (tmp_path / f"{NAME}.1" / "rest").exists()
    assert fleet.load_check_point(exe, str(tmp_path), trainer_id=0) == TrainStatus(2)


@pytest.mark.parametrize("text", ["", "[]", '{"epoch": 1}'])
def test_a_checkpoint_that_does_not_say_how_far_it_came_is_damaged(
    exe: fluid.Executor, tmp_path: Path, text: str
) -> None:
    fleet = begun(exe)
    fleet.save_check_point(exe, str(tmp_path), TrainStatus(1))
    set_weights(7.0)
    (tmp_path / f"{NAME}.0" / "fleet_train_status").write_text(text)
    with pytest.raises(RuntimeError, match="how far training came"):
        fleet.load_check_point(exe, str(tmp_path), trainer_id=0)
    (tmp_path / f"{NAME}.0" / "fleet_train_status").unlink()
    with pytest.raises(RuntimeError, match="cannot be read"):
        fleet.load_check_point(exe, str(tmp_path), trainer_id=0)
    assert weights() == [7.0, 7.0]


def test_checkpoints_elsewhere_are_copied_there_and_back(
    exe: fluid.Executor, tmp_path: Path
) -> None:
    fleet, fs, cache = begun(exe), Elsewhere(tmp_path / "far"), str(tmp_path / "cache")
    for epoch, value in ((1, 4.0), (2, 6.0)):
        set_weights(value)
        fleet.save_check_point(
            exe,
            "far:kept",
            TrainStatus(epoch),
            fs=fs,
            local_cache_path=cache,
            remain_all_checkpoint=False,
        )
    set_weights(0.0)
    found = fleet.load_check_point(exe, "far:kept", 1, fs=fs, local_cache_path=cache)
    assert found == TrainStatus(2)
    assert weights() == [6.0, 6.0]
    assert fs.list_dirs("far:kept") == [f"{NAME}.1"]
    assert not [*(tmp_path / "cache").iterdir()]


def test_files_of_this_machine(tmp_path: Path) -> None:
    fs, a, b = LocalFS(), str(tmp_path / "a"), str(tmp_path / "b")
    fs.mkdirs(f"{a}/inner")
    fs.touch(f"{a}/file")
    assert fs.ls_dir(a) == (["inner"], ["file"])
    assert fs.ls_dir(b) == ([], [])
    assert (fs.is_dir(a), fs.is_file(f"{a}/file"), fs.stat(b)) == (True, True, False)
    fs.upload(a, b)
    fs.download(f"{a}/file", f"{b}/again")
    assert fs.ls_dir(b)[1] == ["again", "file"]
    refused: list[Callable[[], object]] = [
        lambda: fs.mv(a, b),
        lambda: fs.mv(f"{a}/nothing", f"{a}/file"),
        lambda: fs.touch(f"{a}/file", exist_ok=False),
        lambda: fs.mkdirs(f"{a}/file"),
        lambda: fs.upload(f"{a}/nothing", b),
    ]
    for refuse in refused:
        with pytest.raises(CheckpointError):
            refuse()
    fs.rename(a, b, overwrite=True)
    fs.delete(a)
    assert fs.ls_dir(b) == (["inner"], ["file"])
    fs.delete(b)
    assert not fs.is_exist(b)
    with pytest.raises(UnsupportedError, match="afs://x"):
        BDFS("afs://x", "user")
