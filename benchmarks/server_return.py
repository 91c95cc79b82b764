"""Recovery time after the loss of a server with a state of 100 MB.

    python benchmarks/server_return.py [--width 112000] [--steps 120] [--kill-after 40]

`jaxfleet launch` starts one trainer and one server; the model is that of `steady_memory.py`, whose
8.3 million parameters with Adam make 100 MB. After some steps the trainer kills the server, which
the launch restarts. The trainer's next step waits for that; the log splits the time: until the new
process serves, and from then on, which is reading the state, replaying steps and the step itself.
The replay alone is timed in the trainer, which waits until the server has compiled its blocks (and
a heartbeat, 1.5 s of the time "from then on").
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import print_table
from steady_memory import CLASSES, INPUTS, ROWS, start, train_step

import jaxfleet as jf
from jaxfleet.ps.client.server_recovery import ServerRecovery

LONGEST_S = 1800.0
HEARTBEAT_S = 1.5  # longer than the time between two heartbeats


def train(width: int, steps: int, kill_after: int) -> None:
    """Trains in this process, and kills the server on the way."""
    replay = ServerRecovery._replay  # noqa: SLF001  # timed alone

    def timed(recovery: ServerRecovery, server: int, waiting: Any, *, pushes: bool) -> None:
        heard: Any = recovery.outbox._heartbeat  # type: ignore[attr-defined]  # noqa: SLF001
        time.sleep(HEARTBEAT_S)
        while heard.pulse(server).doing == "compiling":
            time.sleep(0.01)
        began = time.monotonic()
        replay(recovery, server, waiting, pushes=pushes)
        _say(f"replay took {time.monotonic() - began:.3f}")

    replaced: Any = ServerRecovery
    replaced._replay = timed  # noqa: SLF001
    rng, state = np.random.default_rng(1), start(width)
    x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    batch = {"x": x, "y": rng.integers(0, CLASSES, ROWS).astype(np.int32)}
    strategy = jf.DistributedStrategy(mode="pserver", replay_bytes=1 << 32)
    step = jf.distribute(train_step, example=(state, batch), strategy=strategy)
    with step:
        for number in range(1, steps + 1):
            if number == kill_after:
                os.kill(_server(), signal.SIGKILL)
                _say(f"killed at {time.time():.2f}")
            began = time.time()
            state, _ = step(state, batch)
            _say(f"step {number} took {time.time() - began:.3f} until {time.time():.2f}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _server() -> int:
    """Returns the pid of the server, a sibling of this process."""
    for folder in Path("/proc").iterdir():
        words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdecimal() else []
        if b"serve" in words and b"--standby" not in words:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getppid():
                return int(folder.name)
    raise RuntimeError("there is no server")


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark server_return.")
    parser.add_argument("--quick", action="store_true", help="a small state")
    parser.add_argument("--width", type=int, default=112_000)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kill-after", type=int, default=40)
    parser.add_argument("--train", action="store_true", help="be the trainer")
    arguments = parser.parse_args()
    width = 1000 if arguments.quick else arguments.width
    words = ["--width", str(width), "--steps", str(arguments.steps)]
    words += ["--kill-after", str(arguments.kill_after)]
    if arguments.train:
        train(width, arguments.steps, arguments.kill_after)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxfleet", "launch", "--checkpoint-dir", folder]
        command += [__file__, "--train", *words]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        lines = [(time.time(), line) for line in process.stdout]
        if process.wait(LONGEST_S):
            raise RuntimeError("".join(line for _, line in lines))
    text = "".join(line for _, line in lines)
    killed = float(re.findall(r"killed at (\S+)", text)[0])
    serving = [at for at, line in lines if "serving at" in line][1]
    steps = [float(x) for x in re.findall(r"step \d+ took (\S+)", text)]
    took = steps[arguments.kill_after - 1]
    again = re.findall(r"goes on after step (\d+)", text)[0]
    rows = [
        ["a step, median", f"{statistics.median(steps):.2f}"],
        ["the step that waits", f"{took:.2f}"],
        ["until the new process serves", f"{serving - killed:.2f}"],
        ["from then on", f"{took - (serving - killed):.2f}"],
        ["steps sent anew", str(arguments.kill_after - 1 - int(again))],
        ["of it, in", re.findall(r"replay took (\S+)", text)[0]],
    ]
    print_table(("", "s"), rows)


if __name__ == "__main__":
    main()
