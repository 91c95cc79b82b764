"""Many steps on emulated devices never deadlock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("many_steps.py")
DEADLINE_S = 80.0  # a run takes 3 to 15 s; XLA itself gives up on a rendezvous after 40 s
GRACE_S = 20.0

pytestmark = pytest.mark.processes


def take(steps: int, devices: int, between: str) -> None:
    """Runs steps in a new process; fails with its output on a timeout."""
    options = {"steps": steps, "devices": devices, "between": between, "deadline-s": DEADLINE_S}
    command = [sys.executable, str(SCRIPT)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S + GRACE_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    assert done.stdout.splitlines()[-1] == f"{steps} steps on {devices} devices"


@pytest.mark.grid
@pytest.mark.parametrize(
    ("devices", "steps"),
    [
        (8, 300),
        (4, 1000),
        (8, 1000),
        (32, 200),
    ],
)
def test_steps_that_follow_at_once(devices: int, steps: int) -> None:
    take(steps, devices, "nothing")


@pytest.mark.grid
@pytest.mark.parametrize("between", ["checkpoint", "evaluation", "another_step"])
def test_steps_with_what_a_user_does_between_them(between: str) -> None:
    take(300, 8, between)
