"""A job's first failure stops it, and its launch has the exit status of the failed process."""

import time
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from jaxfleet.launch import launch
from tests.launch.jobs import DEAF, IDLE, job, noted, noting, runs, starting, waiting

pytestmark = pytest.mark.processes

FIRST_FAILS = """
import os, sys, time
if os.environ["PADDLE_TRAINER_ID"] == "0":
    time.sleep(0.3)
    print("first breaks", file=sys.stderr)
    sys.exit(3)
"""


def test_a_job_that_goes_well_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(job("print('trained')", trainers=2)) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["trainer 0 | trained", "trainer 1 | trained"]
    assert "trainer 1 ended well" in err
    assert "server 0 stopped with SIGTERM" in err
    assert "all trainers ended well, and server 0 heard no bye of them" in err
    assert "strategy='pserver'" in err


def test_servers_that_end_by_themselves_are_not_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(job("pass", "import time; time.sleep(0.5)", grace_s=10.0)) == 0
    err = capsys.readouterr().err
    assert "server 0 ended well" in err
    assert "heard no bye" not in err


def test_the_first_failure_stops_all_and_its_exit_code_is_the_launchs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = noting(tmp_path)
    assert launch(job(note + FIRST_FAILS + IDLE, note + IDLE, servers=2, trainers=3)) == 3
    err = capsys.readouterr().err.splitlines()
    assert len(noted(tmp_path)) == 5
    assert not any(runs(pid) for pid in noted(tmp_path))
    assert err.count("trainer 0 | first breaks") == 1
    assert err[-1] == "launch    | trainer 0 ended with exit code 3; its last lines are above"


def test_the_traceback_of_the_process_that_failed_is_shown_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(job("raise ValueError('this once')")) == 1
    assert capsys.readouterr().err.count("ValueError: this once") == 1


@pytest.mark.grid
def test_last_lines_that_others_pushed_off_the_screen_are_shown_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The server writes more than a screen before it ends.
    chatty = (
        "import signal, time\n"
        "def stop(*_):\n    print('bye\\n' * 60, flush=True)\n    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    fails = "import time\nfor n in range(100): print('line', n)\ntime.sleep(1)\nraise SystemExit(1)"
    assert launch(job(fails, chatty)) == 1
    err = capsys.readouterr().err
    assert "line 79" not in err
    assert [f"trainer 0 | line {n}" in err for n in range(80, 100)] == [True] * 20


def test_a_script_of_paddles_that_changed_nothing_is_told_what_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(job("import paddle.fluid")) == 1
    assert "hint: begin the script with: import jaxfleet.compat;" in capsys.readouterr().err


def test_a_trainer_that_a_signal_kills_gives_128_and_the_signal() -> None:
    assert launch(job("import os; os.kill(os.getpid(), 9)")) == 137


def test_a_command_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(replace(job("pass"), server=("no-such-command",), restarts=0)) == 127
    assert "server 0 ended with exit code 127" in capsys.readouterr().err


def test_a_script_that_ignores_sigterm_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = f"if os.environ['PADDLE_TRAINER_ID'] == '1':\n{indent(DEAF + noting(tmp_path), '  ')}"
    both = f"import os\n{second}  {IDLE}\n{waiting(tmp_path)}raise SystemExit(4)"
    assert launch(job(both, trainers=2, grace_s=0.5)) == 4
    assert "trainer 1 stopped with SIGKILL" in capsys.readouterr().err
    assert not any(runs(pid) for pid in noted(tmp_path))


def test_a_process_that_stands_still_is_stopped_too(tmp_path: Path) -> None:
    stands = noting(tmp_path) + "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    grace_s = 120.0
    began = time.monotonic()
    assert launch(job(waiting(tmp_path) + "raise SystemExit(4)", stands, grace_s=grace_s)) == 4
    assert time.monotonic() - began < grace_s  # it is continued, not left until it is killed
    assert not any(runs(pid) for pid in noted(tmp_path))


def test_what_a_trainer_started_ends_with_it(tmp_path: Path) -> None:
    child = noting(tmp_path) + IDLE
    assert launch(job(starting(child) + waiting(tmp_path))) == 0
    assert len(noted(tmp_path)) == 1
    assert not any(runs(pid) for pid in noted(tmp_path))


@pytest.mark.grid
def test_what_a_trainer_started_is_killed_where_it_will_not_end(tmp_path: Path) -> None:
    child = DEAF + noting(tmp_path) + IDLE
    failing = starting(child) + waiting(tmp_path) + "raise SystemExit(5)"
    assert launch(job(failing, grace_s=0.5)) == 5
    assert len(noted(tmp_path)) == 1
    assert not any(runs(pid) for pid in noted(tmp_path))


def test_a_job_may_have_a_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(job(IDLE, timeout_s=1.0)) == 124
    assert "the job was not done after 1 s" in capsys.readouterr().err
