"""A folder whose content is executed or trusted belongs to this user alone."""

import os
import stat
import warnings
from pathlib import Path

import pytest

from jaxfleet.env import is_private, runtime_dir
from jaxfleet.observability import read_token, write_token
from jaxfleet.tables import numba_jit

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "above" / "cache"
    made.mkdir(parents=True)
    return made


def test_a_new_folder_is_this_users_alone(folder: Path) -> None:
    assert is_private(folder)
    (folder.parent / "link").symlink_to(folder)
    assert is_private(folder.parent / "link")
    assert not is_private(folder / "not there")


@pytest.mark.parametrize("mode", [0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_not(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert not is_private(folder)


def test_a_folder_that_others_may_exchange_is_not(folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert not is_private(folder)
    folder.parent.chmod(0o1777)  # as /tmp is
    assert is_private(folder)


@as_root
def test_a_folder_of_another_user_is_not(folder: Path) -> None:
    os.chown(folder, NOBODY, -1)
    assert not is_private(folder)
    os.chown(folder, 0, -1)
    os.chown(folder.parent, NOBODY, -1)
    assert not is_private(folder)


@as_root
def test_a_user_namespace_shows_folders_above_as_the_overflow_users(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, overflow = tmp_path / "uid_map", tmp_path / "overflowuid"
    monkeypatch.setattr("jaxfleet.env.folders._USER_MAP", users)
    monkeypatch.setattr("jaxfleet.env.folders._OVERFLOW_USER", overflow)
    overflow.write_text(f"{NOBODY}\n")
    users.write_text("         0       1000          1\n")
    os.chown(folder.parent, NOBODY, -1)
    assert is_private(folder)
    folder.parent.chmod(0o777)
    assert not is_private(folder)
    folder.parent.chmod(0o755)
    users.write_text("         0          0 4294967295\n")  # none: an ordinary user
    assert not is_private(folder)
    users.write_text("         0       1000          1\n")
    os.chown(folder.parent, NOBODY - 1, -1)
    assert not is_private(folder)
    os.chown(folder.parent, 0, -1)
    os.chown(folder, NOBODY, -1)
    assert not is_private(folder)


@as_root
def test_a_group_of_this_user_alone_may_write_and_no_other(folder: Path) -> None:
    folder.chmod(0o770)
    os.chown(folder, -1, 0)
    assert is_private(folder)
    os.chown(folder, -1, NOBODY)
    assert not is_private(folder)


def test_compiled_functions_are_kept_in_a_private_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFLEET_CACHE_DIR", str(tmp_path / "kept"))
    find = numba_jit._cache_dir.__wrapped__  # noqa: SLF001
    found = find()
    assert found is not None
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    (tmp_path / "kept").chmod(0o777)
    with pytest.warns(UserWarning, match="another user may change what is there"):
        assert find() is None


def test_a_token_is_found_by_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = write_token(9464, "word")
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (read_token(9464), read_token(9465)) == ("word", None)
    path.parent.chmod(0o777)
    assert (runtime_dir(), read_token(9464), write_token(9464, "x")) == (None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "not there"))
        assert write_token(9464, "x") is None
