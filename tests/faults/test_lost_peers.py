"""A peer that dies, hangs, fails or leaves early is named by the others' errors."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from jaxfleet.errors import JaxfleetError, PeerLostError
from tests.faults.cluster import LOST_S, STEP_S, check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_jobs import KilledError, kill
from tests.faults.memory_training import TrainingJob

LONG = ("--steps=500", "--pause=0.05", "--step-timeout=30")
SOON_S = 1.0  # on top of a deadline: heartbeats and polls


def fail() -> None:
    raise RuntimeError("the script failed")


@pytest.mark.parametrize(
    ("end", "error"), [(kill, KilledError), (fail, RuntimeError)], ids=["killed", "failed"]
)
def test_a_trainer_that_ends_without_a_bye_is_named_to_the_others(
    end: Callable[[], None], error: type[Exception]
) -> None:
    job = TrainingJob(servers=1, options=LONG).run({(1, 20): end})  # some heartbeats later
    job.error("trainer 1", error)
    text = job.error("trainer 0", PeerLostError)
    assert text.startswith("trainer 1 is lost: silent for")
    found = re.search(r"last heartbeat [\d.]+ s ago: step (\d+); trainer 0 waited", text)
    assert found is not None
    waited = re.search(r"trainer 0 waited [\d.]+ s in (pull|reduce) of step (\d+) for ", text)
    assert waited is not None
    assert int(found[1]) <= int(waited[2])  # a heartbeat is older than the message after it
    ended_s = job.ends["trainer 1"].at_s
    assert job.ends["trainer 0"].at_s - ended_s < LOST_S + SOON_S
    assert "no trainer lives: trainer" in job.error("server 0", JaxfleetError)
    assert job.ends["server 0"].at_s - ended_s < 2 * LOST_S + STEP_S + SOON_S


def test_a_trainer_that_stands_still_is_named_and_fails_when_it_goes_on() -> None:
    job = TrainingJob(servers=1, options=LONG, step_s=30.0)
    still_s = LOST_S + 3.0
    job.run({(1, 6): partial(job.stop, "trainer 1", still_s)})
    text = job.error("trainer 0", PeerLostError)
    assert "trainer 1 is lost" in text
    assert "last heartbeat" in text
    job.error("trainer 1", PeerLostError)
    first, second = (job.ends[f"trainer {number}"].at_s for number in range(2))
    assert first < second < first + LOST_S + still_s + SOON_S


def test_a_trainer_that_leaves_early_is_named_to_the_others() -> None:
    job = TrainingJob(servers=1, options=[*LONG, "--stop-at=6"], step_s=30.0).run()
    assert job.ends["trainer 1"].error is None
    assert "trainer 1 left after step 5" in job.error("trainer 0", PeerLostError)


def test_a_server_that_stands_still_for_a_moment_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # Longer than trainers may be silent, and shorter than servers may be.
    words = ["--steps=14", "--pause=0.05", "--step-timeout=30"]
    job = TrainingJob(tmp_path, returns_s=20.0, step_s=30.0, options=words)
    job.run({(0, 3): partial(job.stop, "server 0", LOST_S + 1.5)})
    check_same(job.results(), undisturbed("plain", 14))
    assert job.starts == [1, 1]


def test_a_server_that_stands_still_is_named() -> None:
    job = TrainingJob(servers=1, options=LONG, step_s=30.0)
    job.run({(0, 3): partial(job.stop, "server 0", 100.0)})
    for trainer in range(2):
        text = job.error(f"trainer {trainer}", PeerLostError)
        assert "server 0 at" in text
        assert "was lost at step 4" in text
        assert "no heartbeat for 2.0 s" in text
