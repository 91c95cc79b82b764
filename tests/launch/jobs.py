"""Jobs of small scripts, which replace trainers and servers and need no JAX."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxfleet.errors import StrategyError
from jaxfleet.launch import Job
from jaxfleet.launch.placement import Ports

WAIT_S = 120.0
IDLE = "import time; time.sleep(200)"
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""
# Writes the process's identity to a file, so that a test can look for it afterwards.
NOTE = """
import os, pathlib, sys
role = os.environ["TRAINING_ROLE"].lower()
which = os.environ.get("PADDLE_TRAINER_ID") or os.environ["PADDLE_CURRENT_ENDPOINT"][-5:]
pathlib.Path({folder!r}, f"{{role}}-{{which}}-{{os.getpid()}}").touch()
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


def job(trainer: str, server: str = IDLE, **options: Any) -> Job:
    """Returns a job whose trainers and servers run source code, with a short grace period."""
    settings = {"grace_s": 1.0, "timeout_s": WAIT_S} | options
    return Job(trainer=python(trainer), server=python(server), **settings)


def noting(folder: Path) -> str:
    """Returns the code with which a process writes its pid to a folder."""
    return NOTE.format(folder=str(folder))


def waiting(folder: Path) -> str:
    """Returns the code that waits until a folder is not empty."""
    here = f"list(pathlib.Path({str(folder)!r}).iterdir())"
    return f"import pathlib, time\nwhile not {here}:\n    time.sleep(0.05)\n"


def free_ports(count: int) -> int:
    for _ in range(50):
        found = Ports(1)
        first = int(found.endpoints[0].rpartition(":")[2])
        found.close()
        with contextlib.suppress(StrategyError, OverflowError):
            Ports(count, first=first).close()
            return first
    raise AssertionError(f"no {count} ports that follow each other")


def starting(code: str) -> str:
    """Returns the code that starts another process and does not wait for it."""
    return f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {code!r}])\n"


def noted(folder: Path, role: str = "") -> list[int]:
    """Returns the pids that processes wrote."""
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"{role}*-*")]


def runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return not stat.parent.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(reached: Callable[[], bool], what: str) -> None:
    """Waits for an effect of other processes."""
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


LAUNCH = """
import sys
from jaxfleet.launch import Job, launch
job = Job(trainer={trainer!r}, server={server!r}, servers={servers}, trainers={trainers},
          grace_s={grace_s}, timeout_s={timeout_s}, checkpoint_dir=None)
sys.exit(launch(job))
"""


@contextmanager
def launching(job: Job) -> Iterator[subprocess.Popen[str]]:
    """Launches a job from another process, to which a test can send signals."""
    code = LAUNCH.format_map(vars(job))
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with launcher:
            try:
                yield launcher
            finally:
                if launcher.poll() is None:
                    launcher.send_signal(signal.SIGTERM)
                    launcher.communicate(timeout=WAIT_S)
    finally:
        if launcher.poll() is None:
            launcher.kill()
