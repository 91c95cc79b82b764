"""`jaxfleet passes`, and the command itself."""

import subprocess
import sys

import pytest

from jaxfleet.cli import main


def test_passes_are_listed_with_their_first_line_and_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "dce: Removes operators whose results are unused." in lines
    assert "    bucket_size_bytes: int = 4194304" in lines
    assert "    keep: [str, ...] = []" in lines


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxfleet", "passes"],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert "donate: " in done.stdout


def test_a_reader_that_closes_the_pipe_early_is_no_error() -> None:
    command = [sys.executable, "-m", "jaxfleet", "passes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(timeout=250) == 0


@pytest.mark.parametrize("words", [["--help"], ["opt", "--help"], ["dump", "--help"]])
def test_help_names_what_can_be_given(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: jaxfleet")


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_an_option_in_front_of_the_command_is_told_where_it_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--import", "my_passes", "passes"])
    assert ended.value.code == 2
    assert "--import is not an option of jaxfleet itself: write it behind the command" in (
        capsys.readouterr().err
    )


def test_the_help_of_dump_and_passes_shows_them_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    for command, example in (
        ("dump", "jaxfleet dump --dump-dir dumps train.py -- --source of-the-script"),
        ("passes", "jaxfleet passes --import my_passes"),
    ):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert example in capsys.readouterr().out
