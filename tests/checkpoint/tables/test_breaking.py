"""An interrupted save leaves the older tables or the newer ones, never a mix."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.checkpoint import CheckpointSeries
from jaxfleet.checkpoint.tables import TableSeries, saved_tables
from tests.checkpoint.tables.breaker import POINTS, STEPS, Flat, after
from tests.checkpoint.tables.kept import Kept

pytestmark = pytest.mark.processes
LIGHT = str(Path(__file__).with_name("light.py"))


@contextmanager
def breaker(how: str, folder: Path) -> "Iterator[subprocess.Popen[str]]":
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, LIGHT, "breaker", how, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.grid
def test_wherever_a_save_breaks_the_tables_are_those_of_one_step(tmp_path: Path) -> None:
    """Writes, syncs, renames and removals are points; unsynced data is lost at each."""
    with breaker("points", tmp_path) as process:
        said, _ = process.communicate(timeout=100)
        assert process.returncode == 0
    *saved, total = map(int, said.split())
    assert len(saved) == POINTS
    assert total > POINTS
    expected = [after(step).content() for step in range(STEPS + 1)]
    seen = set()
    for number, last in enumerate(saved):
        store = Kept()
        step = TableSeries(CheckpointSeries(tmp_path / str(number)), [store]).restore() or 0
        assert last <= step <= last + 1
        assert store.content() == expected[step], f"point {number}"
        seen.add(step - last)
    assert seen == {0, 1}


@pytest.mark.few(2)
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06, 0.1])
def test_a_process_killed_in_a_save_leaves_the_tables_of_one_step(
    tmp_path: Path, delay_s: float
) -> None:
    series = CheckpointSeries(tmp_path)
    with breaker("forever", tmp_path) as process:
        assert process.stdout is not None
        last = [int(process.stdout.readline()) for _ in range(2)][-1]
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        last = max([last, *map(int, process.stdout.read().split())])
    step = series.latest()
    assert step is not None
    assert last <= step <= last + 1
    (found,) = saved_tables(series.chain(step))["flat"].batches()
    (expected,) = Flat(step).batches()
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.counters["touched"], expected.counters["touched"])
