"""A secret comes from a file that only its owner can read, and gives both ends the same keys."""

import os
from pathlib import Path

import pytest

from jaxfleet.errors import StrategyError
from jaxfleet.transport.secret import derive_keys, read_secret


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_read_without_the_line_s_end(tmp_path: Path) -> None:
    assert read_secret(written(tmp_path / "s", b"0123456789abcdef\n")) == b"0123456789abcdef"


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="at least 16 bytes, and this one has 15"):
        read_secret(written(tmp_path / "s", b"0123456789abcde\n"))
    with pytest.raises(StrategyError, match="at least 16 bytes"):
        derive_keys(b"")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o601])
def test_a_secret_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(StrategyError, match=f"whose mode is {mode:o}") as caught:
        read_secret(written(tmp_path / "s", b"0123456789abcdef", mode))
    assert "chmod 600" in caught.value.__notes__[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "s", b"0123456789abcdef")
    os.chown(path, 65534, -1)
    with pytest.raises(StrategyError, match="belongs to user 65534, who can change it"):
        read_secret(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="none"):
        read_secret(tmp_path / "none")


def test_the_same_secret_gives_the_same_keys_and_another_others() -> None:
    one, again, other = (derive_keys(s * 16) for s in (b"a", b"a", b"b"))
    assert one == again
    fields = ("server_public", "server_secret", "client_public", "client_secret")
    values = [getattr(keys, field) for keys in (one, other) for field in fields]
    assert len(set(values)) == 8
    assert all(len(value) == 40 for value in values)


def test_keys_do_not_print() -> None:
    keys = derive_keys(b"a" * 16)
    assert keys.server_secret.decode() not in repr(keys)
    assert repr(keys) == "Keys(...)"
