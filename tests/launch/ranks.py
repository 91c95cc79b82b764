"""Collective jobs of small scripts, which replace ranks and need no JAX."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxfleet.launch import CollectiveJob
from tests.launch.jobs import WAIT_S, python

# Writes its place as found in the environment.
SAYS = """
import json, os
names = ("PADDLE_", "POD_IP", "TRAINING_ROLE", "JAXFLEET_", "FLAGS_selected_gpus", "XLA_FLAGS",
         "http_proxy", "https_proxy", "no_grpc_proxy", "JAX_PLATFORMS", "NPROC")
found = {name: value for name, value in os.environ.items() if name.startswith(names)}
print(json.dumps(found), flush=True)
"""
# Meets the other ranks of its start, and then fails or waits for its end.
FAILS = """
import os, pathlib, sys, time
start, rank = int(os.environ["JAXFLEET_RESTART"]), os.environ["PADDLE_TRAINER_ID"]
here = pathlib.Path({folder!r})
(here / f"start{{start}}.{{rank}}").touch()
while len(list(here.glob(f"start{{start}}.*"))) < int(os.environ["PADDLE_TRAINERS_NUM"]):
    time.sleep(0.05)
if start < {times}:
    if rank in {failing!r}:
        print("breaks in start", start, file=sys.stderr)
        sys.exit(7 + start)
    time.sleep(60)
"""


def failing(folder: Path, times: int, *, ranks: str = "1") -> str:
    """Returns the code of ranks some of which fail in the first starts, once all have arrived."""
    return FAILS.format(folder=str(folder), times=times, failing=ranks)


def ranks(code: str, **options: Any) -> CollectiveJob:
    """Returns a job whose ranks run source code, with a short grace period."""
    settings = {"grace_s": 1.0, "timeout_s": WAIT_S} | options
    return CollectiveJob(command=python(code), **settings)


def places(out: str) -> list[dict[str, str]]:
    """Returns the places that ranks reported, by rank and start."""
    lines = [line.partition(" | ")[2] for line in out.splitlines() if " | {" in line]
    by = ("PADDLE_TRAINER_ID", "JAXFLEET_RESTART")
    return sorted(map(json.loads, lines), key=lambda place: [place.get(name, "") for name in by])


@contextmanager
def command(folder: Path, code: str, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs `jaxfleet launch` with options in another process, on a script with this code."""
    script = folder / "script.py"
    script.write_text(code)
    words = [sys.executable, "-m", "jaxfleet", "launch", "--grace", "1", *options, str(script)]
    launcher = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        with launcher:
            yield launcher
    finally:
        launcher.kill()  # its guard ends the remaining processes
