"""Progress is one line where there is a terminal or a notebook, and a notice elsewhere."""

import contextlib
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from jaxfleet.observability import Progress
from jaxfleet.observability.progress import LiveLine, Notebook, find_screen
from tests.markup import text_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Paper:
    """A screen that keeps all that was drawn."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def draw(self, text: str, share: float | None) -> None:
        self.drawn.append(text if share is None else f"{share:.0%} {text}")

    def clear(self) -> None:
        self.drawn.append("")


def a_line(paper: Paper) -> LiveLine:
    return LiveLine(lambda: paper, every_s=None)


def test_nothing_is_drawn_of_short_work() -> None:
    clock, paper = Clock(), Paper()
    line = a_line(paper)
    with Progress("planning", clock=clock, line=line) as progress:
        clock.now = 1.9
        progress.show("compiling")
        line.tick()
    assert paper.drawn == []


def test_long_work_is_drawn_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's own handlers count as a program that configures logging.
    monkeypatch.setattr("jaxfleet.observability.progress.is_configured", lambda: False)
    clock, paper = Clock(), Paper()
    line = a_line(paper)
    with Progress("planning", clock=clock, line=line) as progress:
        clock.now = 2.0
        line.tick()
        progress.show("compiling")
        line.tick()
        line.tick()
        progress.report("plan 3", share=0.25)
        line.tick()
    lines = ["planning (2 s so far)", "planning: compiling (2 s so far)"]
    assert paper.drawn == [*lines, "25% planning: plan 3 (2 s so far)", ""]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_line_goes_when_the_work_fails(error: type[BaseException]) -> None:
    clock, paper = Clock(), Paper()
    line = a_line(paper)
    with (
        contextlib.suppress(error),
        Progress("planning", clock=clock, line=line),
    ):
        clock.now = 3.0
        line.tick()
        raise error
    assert paper.drawn == ["planning (3 s so far)", ""]


def test_the_innermost_long_work_is_shown() -> None:
    clock, paper = Clock(), Paper()
    line = a_line(paper)
    with Progress("outer", clock=clock, line=line):
        clock.now = 5.0
        with Progress("inner", clock=clock, line=line):
            line.tick()
            clock.now = 8.0
            line.tick()
    assert paper.drawn == ["outer (5 s so far)", "inner (3 s so far)", "outer (8 s so far)", ""]


def test_reports_are_notices_where_there_is_no_screen(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    line = LiveLine(lambda: None)
    with (
        caplog.at_level(logging.INFO, "jaxfleet"),
        Progress("planning", clock=clock, line=line) as progress,
    ):
        progress.report("early")
        clock.now = 3.0
        progress.show("not worth a line of a log")
        progress.report("plan 1", share=0.5)
    assert caplog.messages == ["jaxfleet: planning: plan 1 (3 s so far)"]


def test_a_program_that_configures_logging_keeps_its_notices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, paper = Clock(), Paper()
    line = a_line(paper)
    with (
        caplog.at_level(logging.INFO, "jaxfleet"),
        Progress("planning", clock=clock, line=line) as progress,
    ):
        clock.now = 3.0
        line.tick()
        progress.report("plan 1")
    assert caplog.messages == ["jaxfleet: planning: plan 1 (3 s so far)"]
    assert paper.drawn == ["planning (3 s so far)", ""]  # taken away for the notice


def test_the_environment_turns_it_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXFLEET_PROGRESS", "0")
    clock, paper = Clock(), Paper()
    line = a_line(paper)
    with (
        caplog.at_level(logging.INFO, "jaxfleet"),
        Progress("planning", clock=clock, line=line) as progress,
    ):
        clock.now = 3.0
        progress.report("plan 1")
        line.tick()
    assert caplog.messages == paper.drawn == []


def test_work_of_several_threads_shares_the_line() -> None:
    paper = Paper()
    line = LiveLine(lambda: paper, every_s=0.001)

    def work(number: int) -> None:
        for _ in range(20):
            with Progress(f"thread {number}", quiet_s=0.0, line=line) as progress:
                progress.show("working")
                time.sleep(0.002)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert paper.drawn[-1] == ""
    assert {text[:8] for text in paper.drawn} >= {f"thread {number}" for number in range(8)}


def test_a_notebook_has_one_output_that_is_replaced() -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(data)

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append({**data, "new": "yes"})
        return Handle()

    screen = Notebook(display)
    screen.draw("planning <b>", None)
    screen.draw("planning", 0.5)
    screen.clear()
    assert [data.get("new") for data in shown] == ["yes", None, None]
    assert text_of(shown[0]["text/html"]).strip() == "planning <b>"
    assert 'value="0.500"' in shown[1]["text/html"]
    assert shown[2] == {"text/html": "", "text/plain": ""}


def test_a_kernel_is_found_before_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython  # noqa: PLC0415  # so that this process is like a notebook's

    class Shell:
        kernel: Any = object()

    assert find_screen() is None  # pytest captures stderr
    monkeypatch.setattr(IPython, "get_ipython", Shell)
    assert isinstance(find_screen(), Notebook)


SCRIPT = """
import sys, time
from jaxfleet.observability import Progress
with Progress("planning \\x1b[2J", quiet_s=0.1) as progress:
    progress.report("compiling " + "x" * 300)
    time.sleep({seconds})
    {then}
sys.stderr.write("end\\n")
"""


def on_terminal(script: str, *, interrupt: bool = False, **more: str) -> str:
    """Returns what a script writes to standard error, a terminal."""
    main, other = pty.openpty()
    environment = os.environ | more
    started = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.DEVNULL,
        stderr=other,
        env=environment,
    )
    os.close(other)
    written = b""
    with contextlib.suppress(OSError):  # the terminal closes with the process
        while data := os.read(main, 1 << 16):
            written += data
            if interrupt and b"planning" in written:
                started.send_signal(signal.SIGINT)
                interrupt = False
    os.close(main)
    started.wait(60)
    return written.decode()


@pytest.mark.few(1)
@pytest.mark.parametrize("then", ["pass", "raise ValueError('wrong')"])
def test_a_terminal_has_one_line_that_goes(then: str) -> None:
    written = on_terminal(SCRIPT.format(seconds=0.8, then=then))
    line, *_ = written.split("\r")[1:]
    assert line.startswith("jaxfleet: planning ?[2J: compiling xxx")
    assert len(line) < 80
    after = "end" if then == "pass" else "Traceback"
    assert f"\r{' ' * len(line)}\r{after}" in written
    assert "\x1b" not in written.partition(after)[0]


def test_ctrl_c_takes_the_line_away() -> None:
    written = on_terminal(SCRIPT.format(seconds=60, then="pass"), interrupt=True)
    before, _, after = written.partition("Traceback")
    assert before.endswith(" \r")
    assert "KeyboardInterrupt" in after


def test_a_terminal_is_left_alone_if_the_environment_says_so() -> None:
    script = SCRIPT.format(seconds=0.5, then="pass")
    assert on_terminal(script, JAXFLEET_PROGRESS="0") == "end\r\n"
    script = SCRIPT.format(seconds=0.0, then="pass").replace("0.1", "2.0")
    assert on_terminal(script) == "end\r\n"  # work that ends in time


FORKING = """
import os, threading
from jaxfleet.observability import Progress, progress

held, done = threading.Event(), threading.Event()

def draw():
    with progress._SHARED.hidden():  # as the thread that draws holds the line
        held.set()
        done.wait()

with Progress("outer"):
    drawing = threading.Thread(target=draw)
    drawing.start()
    held.wait()
    child = os.fork()
    if child == 0:
        with Progress("inner") as inner:
            inner.report("in the child")
    done.set()
if child == 0:
    os._exit(7)
drawing.join()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 7)
"""


def test_a_fork_while_the_line_is_drawn_does_not_wait_for_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING]
    with subprocess.Popen(command, start_new_session=True) as started:
        try:
            assert started.wait(30) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # a child that waits, too
