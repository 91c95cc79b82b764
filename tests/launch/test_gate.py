"""The gate of a process: it waits, and is replaced by the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfleet.launch import gate

SHOW = "import sys; print(sys.argv[1:], repr(sys.stdin.read()))"


def run(*command: str, word: bytes = b"\n", launcher: int | None = None) -> tuple[int, str, str]:
    words = [sys.executable, "-I", "-S", gate.__file__, str(launcher or os.getpid()), *command]
    done = subprocess.run(words, input=word, capture_output=True, check=False, timeout=60)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_command_runs_as_it_would_have_without_a_gate() -> None:
    shown = run(sys.executable, "-I", "-S", "-c", SHOW, "two words", "", "$HOME;*")
    assert shown == (0, "['two words', '', '$HOME;*'] ''\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists what is ignored")
def test_a_command_ignores_no_signal_that_it_would_not_have_without_a_gate() -> None:
    words = ("grep", "SigIgn", "/proc/self/status")
    without = subprocess.run(words, capture_output=True, check=True, timeout=60).stdout.decode()
    assert run(*words) == (0, without, "")


def test_nothing_runs_where_the_launch_has_ended(tmp_path: Path) -> None:
    touch = (sys.executable, "-c", f"open({str(tmp_path / 'there')!r}, 'w')")
    assert run(*touch, word=b"")[0] == 1
    assert run(*touch, launcher=1 << 22)[0] == 1
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(("command", "status"), [("no-such-command", 127), ("/", 126)])
def test_a_command_that_cannot_run_is_named(command: str, status: int) -> None:
    found, _, error = run(command)
    assert (found, error.startswith(f"{command}: ")) == (status, True)
