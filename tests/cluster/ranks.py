"""Real ranks of one group, started by tests, with their output."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxfleet.launch.placement import Ports
from tests.faults.cluster import Started

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 400.0  # a job takes 5 to 60 s; more on a busy machine


@contextmanager
def ranks(
    command: Sequence[str | Path],
    folder: Path,
    *,
    count: int,
    devices: int = 1,
    more: Mapping[str, str] | None = None,
) -> Iterator[list[Started]]:
    """Starts processes; at the end, kills the remaining ones and prints the output of each.

    Args:
        command: arguments of `python`.
        folder: of their output.
        count: the number of processes.
        devices: the number of CPU devices of each.
        more: additional environment variables.
    """
    ports = Ports(count)
    started: list[Started] = []
    try:
        for rank in range(count):
            log = folder / f"rank{rank}.txt"
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(devices),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(ports.endpoints),
                "PADDLE_TRAINER_ID": str(rank),
                **(more or {}),
            }
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            started.append(Started(f"rank {rank}", process, log))
            ports.give(rank)
        yield started
    finally:
        ports.close()
        for each in started:
            if each.process.poll() is None:
                each.kill()
            status = each.process.returncode
            sys.stdout.write(f"--- {each.name}, status {status}\n{each.text()}\n")


def all_end_well(started: Sequence[Started]) -> None:
    """Fails unless all processes end with status 0."""
    codes = [each.ends(LONGEST_S) for each in started]
    assert codes == [0] * len(codes)
