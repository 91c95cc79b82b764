"""Output of processes is shown line by line, under their names."""

import sys
from pathlib import Path

import pytest

from jaxfleet.launch import launch
from jaxfleet.launch.output import Console, LineCutter
from tests.launch.jobs import job


def test_lines_are_whole_however_they_come() -> None:
    lines = LineCutter()
    assert lines.feed(b"one\ntw", 0.0) == ["one"]
    assert lines.feed(b"o\r\n\nthree", 0.1) == ["two", ""]
    assert lines.finish() == ["three"]
    assert lines.finish() == []


def test_a_line_that_waits_is_shown_and_then_goes_on() -> None:
    lines = LineCutter()
    assert lines.feed(b"loading", 0.0) == []
    assert lines.pause() == ["loading"]
    assert lines.pause() == []
    assert lines.feed(b"\nnext\n", 5.0) == ["next"]
    lines.feed(b"asks: ", 6.0)
    assert lines.pause() == ["asks: "]
    assert lines.feed(b"done\n\n", 7.0) == ["done", ""]


def test_a_progress_bar_is_shown_now_and_then_and_as_it_was_last() -> None:
    lines = LineCutter()
    shown = [lines.feed(b"\r%d%%" % at, at / 10) for at in range(31)]
    assert [line for each in shown for line in each] == ["0%", "10%", "20%", "30%"]
    assert lines.feed(b"\r100%\n", 3.1) == ["100%"]
    assert lines.feed(b"\n", 3.2) == [""]


def test_a_bar_that_stands_still_is_shown_once() -> None:
    lines = LineCutter()
    assert lines.feed(b"1%\r", 0.0) == ["1%"]
    assert lines.feed(b"2%\r", 0.1) == []
    assert lines.pause() == ["2%"]
    assert lines.pause() == []
    assert lines.finish() == []


def test_a_line_without_end_is_shown_in_pieces() -> None:
    lines = LineCutter()
    pieces = [piece for at in range(100) for piece in lines.feed(b"x" * 4096, at / 1e6)]
    pieces += lines.finish()
    assert "".join(pieces) == "x" * 409_600
    assert 5 <= len(pieces) <= 7


def test_a_bar_without_end_takes_no_more_and_more_memory() -> None:
    lines = LineCutter()
    lines.feed(b"\r", 0.0)
    pieces = [piece for at in range(100) for piece in lines.feed(b"x" * 4096, at / 1e6)]
    assert sum(map(len, pieces)) > 300_000


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert LineCutter().feed(b"\xff\xfeok\n", 0.0) == ["\ufffd\ufffdok"]


class Terminal:
    """A stream that claims to be a terminal."""

    encoding = "ascii"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_names_are_coloured_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(["trainer 0"], lambda: None)
    console.show("trainer 0", ["plain"])
    console.show("trainer 0", ["in colour, \u00e9"], error=True)
    assert capsys.readouterr().out == "trainer 0 | plain\n"
    assert terminal.text.startswith("\033[33mtrainer 0 |\033[0m in colour, \\xe9")


@pytest.mark.processes
def test_both_streams_are_shown_and_a_last_line_without_end_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "import sys\nprint('out'); print('err', file=sys.stderr); print('rest', end='')"
    assert launch(job(code)) == 0
    out, err = capsys.readouterr()
    assert out == "trainer 0 | out\ntrainer 0 | rest\n"
    assert "trainer 0 | err\n" in err


@pytest.mark.grid
@pytest.mark.processes
def test_a_flood_is_shown_whole_and_keeps_nobody_waiting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = """
import os, time
if os.environ["PADDLE_TRAINER_ID"] == "0":
    for n in range(200_000):
        print("flood", n)
else:
    for n in range(5):
        print("calm", n, flush=True)
"""
    assert launch(job(code.replace("print(", "print(*['x'] * 3, "), trainers=2)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("flood" in line for line in lines) == 200_000
    assert [line for line in lines if "calm" in line][-1] == "trainer 1 | x x x calm 4"
    assert lines.index("trainer 1 | x x x calm 4") < len(lines) - 1


@pytest.mark.processes
def test_logs_hold_what_each_process_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, sys\nprint('I am', os.environ['PADDLE_TRAINER_ID'])\nsys.stderr.write('a\\rb')"
    )
    logs = tmp_path / "new" / "logs"
    assert launch(job(code, "print('serves')", trainers=2, log_dir=logs, grace_s=10.0)) == 0
    found = {path.name: path.read_bytes() for path in logs.iterdir()}
    assert found["server-0.log"] == b"serves\n"
    assert sorted(found) == ["server-0.log", "trainer-0.log", "trainer-1.log"]
    assert sorted((b"I am 1\n" + b"a\rb").splitlines()) == sorted(
        found["trainer-1.log"].splitlines()
    )
    assert "trainer 1 | I am 1" in capsys.readouterr().out
