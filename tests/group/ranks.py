"""Real ranks of one group, which tests start, and whose output they show."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxfleet.launch.ports import Ports
from tests.faults.cluster import Started

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 400.0  # a job takes 5 to 60 s; more on a machine that is busy with others


@contextmanager
def ranks(
    command: Sequence[str | Path],
    folder: Path,
    *,
    count: int,
    devices: int = 1,
    more: Mapping[str, str] | None = None,
) -> Iterator[list[Started]]:
    """Starts processes; kills those that are left, and prints what each wrote.

    Args:
        command: what each runs, after `python`.
        folder: where their output goes.
        count: how many.
        devices: how many CPU devices each has.
        more: more of the environment.
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
