"""A Downpour job over files as real processes: two workers and two servers."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.contrib.downpour import script
from tests.contrib.downpour.jobs import files
from tests.faults.cluster import Jobs, Started

DEADLINE_S = 5.0  # of waits that must fail

pytestmark = pytest.mark.processes


def server(jobs: Jobs, number: int) -> Started:
    cluster = jobs.cluster(role="pserver", current_endpoint=jobs.endpoints[number])
    return jobs.start(f"server {number}", command([]), cluster)


def worker(jobs: Jobs, number: int, paths: Sequence[str]) -> Started:
    return jobs.start(f"worker {number}", command(paths), jobs.cluster(trainer_id=number))


def command(paths: Sequence[str]) -> list[str]:
    return [sys.executable, str(Path(script.__file__)), *paths]


def areas(text: str) -> list[float]:
    """Returns the AUC that a worker printed at the first batch of each pass."""
    return [float(line.split("[")[1].strip("]")) for line in text.splitlines() if "auc" in line]


@pytest.mark.grid  # test_training.py runs such jobs in memory
def test_two_workers_and_two_servers_learn_from_files(tmp_path: Path) -> None:
    paths = [files(tmp_path, count, seed=seed) for seed, count in ((0, 320), (1, 352))]
    with Jobs(tmp_path / "job", servers=2) as jobs:
        servers = [server(jobs, number) for number in range(2)]
        workers = [worker(jobs, number, paths[number]) for number in range(2)]
        assert [one.ends(120) for one in (*workers, *servers)] == [0, 0, 0, 0]
        for one in workers:
            first, _, last = areas(one.text())
            assert last > first
            assert last > 0.6
        assert all("served" in one.text() for one in servers)


@pytest.mark.grid
def test_a_worker_that_is_killed_is_named_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGS_rpc_deadline", str(int(DEADLINE_S * 1000)))
    paths = files(tmp_path, 60_000)
    with Jobs(tmp_path / "job") as jobs:
        served = server(jobs, 0)
        left, killed = worker(jobs, 0, paths), worker(jobs, 1, paths)
        killed.reaches("batch 100:", 120)
        killed.send(signal.SIGKILL)
        left.fails("PeerLostError: trainer 1 is lost", timeout_s=DEADLINE_S + 60)
        killed.ends()
        served.send(signal.SIGTERM)
        served.ends()
