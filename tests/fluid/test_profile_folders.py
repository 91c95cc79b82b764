"""Writing a profile keeps existing files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxfleet import fluid


class Traces:
    """Replaces jax's profiler: writes a file where a trace has its files."""

    def __init__(self) -> None:
        self.count, self.folder = 0, Path()

    def start_trace(self, folder: str) -> None:
        self.count, self.folder = self.count + 1, Path(folder)

    def stop_trace(self) -> None:
        made = self.folder / "plugins" / "profile" / f"time{self.count}"
        made.mkdir(parents=True)
        (made / "host.xplane.pb").touch()


@pytest.fixture(autouse=True)
def traces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Traces()
    monkeypatch.setattr("jax.profiler.start_trace", made.start_trace)
    monkeypatch.setattr("jax.profiler.stop_trace", made.stop_trace)


def by_stop(path: str) -> None:
    fluid.profiler.start_profiler("CPU")
    fluid.profiler.stop_profiler("total", path)


def by_cuda(path: str) -> None:
    with fluid.profiler.cuda_profiler(path):
        pass


WAYS = pytest.mark.parametrize("profile", [by_stop, by_cuda])


def times(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob("*.pb"))


@WAYS
def test_a_folder_of_the_user_keeps_what_it_holds(
    profile: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("all of it")
    (tmp_path / "plugins").mkdir()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.warns(UserWarning, match="is not a profile"):
            profile(".")
    assert (tmp_path / "data" / "mine").read_text() == "all of it"
    new = {path.name for path in tmp_path.iterdir()} - {"data", "plugins"}
    assert len(new) == 2
    assert sorted(times(tmp_path / name)[0] for name in new) == ["time1", "time2"]


@WAYS
def test_an_earlier_profile_is_replaced(profile: Callable[[str], None], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "profile"
    for at in (1, 2):
        profile(str(folder))
        assert times(folder) == [f"time{at}"]
    assert [path.name for path in folder.iterdir()] == ["plugins"]


@pytest.mark.parametrize("name", ["plugins/mine", "plugins/profile", "mine"])
def test_what_is_like_a_profile_and_is_none_stays(name: str, tmp_path: Path) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("all of it")
    with pytest.warns(UserWarning, match="is not a profile"):
        by_stop(str(tmp_path))
    assert mine.read_text() == "all of it"
    assert times(tmp_path) == ["time1"]


@WAYS
def test_a_file_and_a_link_stay(profile: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("all of it")
    with pytest.warns(UserWarning, match="the profile is in .*/file-.*: .*/file is not a profile"):
        profile(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "all of it"
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    profile(str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert times(tmp_path / "folder") == ["time2"]
    assert times(tmp_path) == ["time1", "time2"]
