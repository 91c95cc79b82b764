"""However a launch ends, none of its processes is left."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfleet.launch import Job
from tests.launch.jobs import (
    DEAF,
    IDLE,
    WAIT_S,
    job,
    launching,
    noted,
    noting,
    runs,
    starting,
    wait_until,
)
from tests.tiers import grid

pytestmark = pytest.mark.processes

SAYS_BYE = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def four_and_a_child(folder: Path) -> Job:
    """Returns a job of two servers and two trainers, each with a child process."""
    note = noting(folder)
    trainer = note + starting(note + IDLE) + SAYS_BYE
    return job(trainer, note + IDLE, servers=2, trainers=2)


def send(launcher: "subprocess.Popen[str]", folder: Path, number: int) -> tuple[str, str]:
    """Sends a signal once all processes have started; returns the whole output."""
    wait_until(lambda: len(noted(folder)) == 6, "six processes")
    launcher.send_signal(number)
    return launcher.communicate(timeout=WAIT_S)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), grid(signal.SIGHUP, 129)]
)
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with launching(four_and_a_child(tmp_path)) as launcher:
        out, err = send(launcher, tmp_path, number)
    assert launcher.returncode == status
    assert not any(runs(pid) for pid in noted(tmp_path))
    assert f"got {number.name}; stopping all" in err
    assert ("interrupted" in out) == (number == signal.SIGINT)


def test_a_launch_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with launching(four_and_a_child(tmp_path)) as launcher:
        send(launcher, tmp_path, signal.SIGKILL)
    assert launcher.returncode == -signal.SIGKILL
    wait_until(lambda: not any(runs(pid) for pid in noted(tmp_path)), "the end of all processes")


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    deaf = DEAF + noting(tmp_path) + IDLE
    with launching(job(deaf, grace_s=60.0)) as launcher:
        wait_until(lambda: len(noted(tmp_path)) == 1, "a trainer")
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr is not None
        while "stopping all" not in launcher.stderr.readline():
            pass
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 130
    assert not any(runs(pid) for pid in noted(tmp_path))


def test_a_launch_whose_output_nobody_reads_ends(tmp_path: Path) -> None:
    talks = noting(tmp_path) + "import time\nwhile True: print('x', flush=True); time.sleep(0.05)"
    with launching(job(talks)) as launcher:
        wait_until(lambda: len(noted(tmp_path)) == 1, "a trainer")
        assert launcher.stdout is not None
        launcher.stdout.close()
        launcher.wait(WAIT_S)
    assert not any(runs(pid) for pid in noted(tmp_path))


def children(pid: int) -> dict[int, str]:
    """Returns the child processes of a process, each with its command."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found[int(folder.name)] = (folder / "cmdline").read_text()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends what its parent leaves")
def test_a_launch_that_is_killed_with_its_guard_leaves_no_process(tmp_path: Path) -> None:
    note = noting(tmp_path) + IDLE
    with launching(job(note, note, servers=2, trainers=2)) as launcher:
        wait_until(lambda: len(noted(tmp_path)) == 4, "four processes")
        (guard,) = [pid for pid, words in children(launcher.pid).items() if "guard.py" in words]
        os.kill(guard, signal.SIGKILL)
        assert all(runs(pid) for pid in noted(tmp_path))
        launcher.kill()
        launcher.communicate(timeout=WAIT_S)
    wait_until(lambda: not any(runs(pid) for pid in noted(tmp_path)), "the end of all processes")
