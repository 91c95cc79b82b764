"""Ranks of a collective job are watched by their own metrics."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxfleet.board import Event, EventDetector
from jaxfleet.cluster.coordinator_client import Doing
from jaxfleet.cluster.rank_metrics import RankCounts, RankExporter
from jaxfleet.errors import ConnectError
from jaxfleet.launch.placement import Ports
from jaxfleet.observability import Board, Sample, read_token, scrape
from tests.board import rank_training
from tests.faults.cluster import SETTINGS, WAIT_S, wait_until


class Member:
    """What the exporter reads of a rank's connection to the coordinator."""

    rank = 1
    doing = Doing(7, "running\n")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_rank_is_its_own_or_of_all() -> None:
    clock = Clock()
    counts = RankCounts(clock)
    for _ in range(2):
        with counts.running():
            clock.now += 3.0
        clock.now += 0.5
        with counts.waiting():  # as while rank 0 writes a checkpoint
            clock.now += 10.0
    with counts.running():
        pass
    assert (counts.run_s, counts.own_s) == (6.0, 1.0)


def exporter(counts: RankCounts | None = None) -> RankExporter:
    return RankExporter(Member(), counts or RankCounts())  # type: ignore[arg-type]


def test_a_rank_is_scraped_as_a_trainer_of_its_number() -> None:
    counts = RankCounts()
    counts.own_s, counts.run_s, counts.saves = 1.5, 2.5, 3
    counts.scalars = lambda: (6, {"loss": 0.5})
    metrics = exporter(counts)
    try:
        port = metrics.start("127.0.0.1", 0, "word")
        with pytest.raises(PermissionError):
            scrape(f"127.0.0.1:{port}")
        found = scrape(f"127.0.0.1:{port}", "word")
    finally:
        metrics.close()
    assert (found.rank, found.own("step"), found.doing) == (1, 7, {1: "step 7: running?"})
    wanted = {"rank_run_seconds_total": 2.5, "saves_total": 3, "ended": 0, "failed": 0}
    assert wanted.items() <= found.values.items()
    assert found.values["resident_bytes"] > 1 << 20
    assert found.scalars == {1: {"loss": 0.5}}
    wanted = {"trainer_own_seconds_total": 1.5, "trainer_scalar_step": 6, "trainer_left": 0}
    assert wanted.items() <= found.of_trainers[1].items()


def test_a_rank_that_ends_waits_for_a_watcher_alone() -> None:
    unwatched = exporter()
    unwatched.start("127.0.0.1", 0)
    began = time.monotonic()
    unwatched.end(is_failed=False)
    assert time.monotonic() - began < 1.0
    watched = exporter()
    address = f"127.0.0.1:{watched.start('127.0.0.1', 0)}"
    scrape(address)
    ending = threading.Thread(target=watched.end, kwargs={"is_failed": True})
    ending.start()
    wait_until(lambda: scrape(address).values["failed"] == 1, "the end", 2.0)
    ending.join(10)
    with pytest.raises((OSError, ConnectError)):
        scrape(address)


@contextmanager
def launched(folder: Path, port: int, *options: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "jaxfleet", "launch", "--nproc", "2", rank_training.__file__]
    environment = {**os.environ, **SETTINGS, "JAXFLEET_METRICS_PORT": str(port)}
    with (folder / "launch.log").open("w") as log:
        job = subprocess.Popen(
            [*command, f"--save={folder / 'saved'}", *options],
            env=environment, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            yield job
        finally:
            job.terminate()
            job.wait(WAIT_S)


def two_ports() -> int:
    """Returns the first of two ports in a row that were free a moment ago."""
    with_next = Ports(2, first=0)
    port = min(int(at.rpartition(":")[2]) for at in with_next.endpoints)
    with_next.close()
    return port


@pytest.mark.grid
def test_a_collective_job_is_watched_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    port = two_ports()
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    board = Board(addresses, lambda at: scrape(at, read_token(int(at.rpartition(":")[2]))))
    detector, late, steps = EventDetector(), [0.0, 0.0], 0
    events: list[Event] = []
    losses: list[float] = []
    with launched(tmp_path, port, "--steps=80") as job:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and not any(e.text.startswith("the job") for e in events):
            board.look()
            looks = {at: one.now or one.error for at, one in board.found.items()}
            events += detector.look(time.time(), looks)
            if len(board.answers) == 2 and all(one.rate("rank_step") for one in board.answers):
                assert board.kind == "rank"
                for number, one in enumerate(board.trainers()):
                    late[number], steps = max(late[number], one.late), max(steps, one.step)
                for number, sample in enumerate(looks.values()):
                    assert isinstance(sample, Sample)
                    if number in sample.scalars:
                        losses.append(sample.scalars[number]["loss"])
            time.sleep(0.5)
        assert job.wait(WAIT_S) == 0, (tmp_path / "launch.log").read_text()
    text = (tmp_path / "launch.log").read_text()
    assert "trained 80 steps" in text
    assert 0 < steps <= 80
    last = float(re.findall(r"trained 80 steps to (\S+)", text)[0])
    assert losses
    assert all(last <= loss <= 16.0 for loss in losses)  # it falls from the first step's
    assert late[1] > 0.3 > late[0]  # the last rank pauses, and the first waits for it
    texts = [event.text for event in events]
    assert texts[-1] == "the job has ended, after step 80"
    (saved,) = [event for event in events if event.kind == "saved"]
    at_s = min(float(found) for found in re.findall(r"saved at (\S+)", text))
    assert saved.text.startswith("rank 0 wrote a checkpoint")
    assert saved.at_s - at_s < 2.0
