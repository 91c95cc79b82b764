"""The benchmark that kills processes at random judges a small job, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.jobs import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
CHAOS = [sys.executable, "benchmarks/chaos.py", "--servers=1", "--trainers=1", "--every=1"]


def started(folder: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*CHAOS, *options],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def processes(folder: Path) -> list[int]:
    """Returns the processes that have a folder in their environment."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdecimal() and str(folder).encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def test_a_job_whose_processes_are_killed_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    with started(tmp_path, "--kills=2") as tool:
        text, _ = tool.communicate()
    assert tool.returncode == 0
    bars = {bar["what"]: bar["value"] for bar in json.loads(text.splitlines()[-1])["bars"]}
    assert bars["leaves that differ from the undisturbed job's"] == 0
    assert bars["processes left behind"] == 0
    assert processes(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_if_it_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path, "--kills=100") as tool:
        assert tool.stdout is not None
        assert "round 1" in tool.stdout.readline()
        assert processes(tmp_path)
        tool.send_signal(number)
        tool.communicate()
    wait_until(lambda: not processes(tmp_path), "the end of all processes")
    assert tool.returncode
