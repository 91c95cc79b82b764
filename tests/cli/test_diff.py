"""`jaxfleet diff`."""

from pathlib import Path

import pytest

from jaxfleet.cli import main

ONE = """\
program p
  param w: f32[4]
  block 0
    forward
      w = jax.neg(w)  # model/train.py:7, in step
"""
OTHER = ONE.replace("jax.neg", "jax.exp")
ELSEWHERE = ONE.replace(":7", ":8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = {"one": ONE, "other": OTHER, "elsewhere": ELSEWHERE, "both": ONE + OTHER}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_equal_programs_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "one.txt", "one.txt"]) == 0
    assert main(["diff", "--structural", "one.txt", "one.txt"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("folder")
def test_different_programs_print_a_unified_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "one.txt", "other.txt"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["--- one.txt", "+++ other.txt"]
    assert lines[-2:] == ["-      w = jax.neg(w)", "+      w = jax.exp(w)"]


@pytest.mark.usefixtures("folder")
def test_source_lines_count_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "one.txt", "elsewhere.txt"]) == 0
    assert main(["diff", "--source", "one.txt", "elsewhere.txt"]) == 1
    assert "+      w = jax.neg(w)  # model/train.py:8, in step" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_a_structural_diff_speaks_of_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--structural", "one.txt", "other.txt"]) == 1
    assert "jax.exp" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_programs_are_compared_in_order_and_one_too_many_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["diff", "one.txt", "both.txt"]) == 1
    assert capsys.readouterr().out == "only in both.txt: program 'p'\n"


@pytest.mark.usefixtures("folder")
def test_a_missing_file_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "one.txt", "nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
