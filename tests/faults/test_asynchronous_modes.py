"""Servers and trainers die in each mode in which trainers do not wait at every step.

Gradients and the rate are 1, so parameters and rows of a table count the applied updates.
"""

import errno
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint.saving import cannot_write
from jaxfleet.errors import PeerLostError
from jaxfleet.ps.server.checkpoints import RecoveryCheckpoints
from jaxfleet.transport.messages import Kind, Message
from tests.faults.cluster import LOST_S
from tests.faults.memory_jobs import kill
from tests.faults.memory_training import TrainingJob
from tests.faults.test_modes import EVERY, MODES, STEPS, counted, options

BOUND = 3
ASYNC = ("--kind=count", "--communication=async", f"--staleness={BOUND}", "--step-timeout=30")
ASYNC_STEPS = 30


def lowest(results: list[dict[str, np.ndarray]]) -> set[float]:
    """Returns the values of the trainer that ended last, after all pushes of both."""
    values = [
        np.concatenate(
            [
                array.ravel()
                for name, array in result.items()
                if (name.startswith("[0]") and "counted" not in name) or name == "rows"
            ]
        )
        for result in results
    ]
    return set(min(values, key=np.sum).tolist())


@pytest.mark.few(3)
@pytest.mark.parametrize("step", [1, 4, 9])
@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_is_started_again_applies_everything_once(
    mode: str, step: int, tmp_path: Path
) -> None:
    words = [*options(mode), f"--steps={STEPS}", "--pause=0.15"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words)
    job.run({(0, step): partial(job.kill_server, 0, away_s=1.0)})
    assert job.starts == [2, 1]
    assert lowest(job.results()) == {counted(mode)}


@pytest.mark.parametrize("mode", ["half_async", "geo", "fl"])  # dc_asgd waits as half_async does
def test_a_server_that_is_gone_is_named(mode: str) -> None:
    words = [*options(mode), "--steps=500", "--pause=0.05"]
    job = TrainingJob(servers=1, trainers=1, options=words)
    job.run({(0, 5): partial(job.kill_server, 0)})
    text = job.error("trainer 0", PeerLostError)
    assert "server 0 at 127.0.0.1:" in text
    assert "was lost at step" in text


@pytest.mark.parametrize("mode", ["geo", "fl"])
def test_a_trainer_that_is_gone_is_named_by_those_who_exchange(mode: str) -> None:
    words = [*options(mode), "--steps=500", "--pause=0.05"]
    job = TrainingJob(servers=1, options=words).run({(1, 5): kill})
    assert "trainer 1 is lost" in job.error("trainer 0", PeerLostError)
    assert job.ends["trainer 0"].at_s - job.ends["trainer 1"].at_s < LOST_S + 1.0


@pytest.mark.grid
def test_a_killed_server_is_brought_level_and_applies_each_push_once(tmp_path: Path) -> None:
    words = [*ASYNC, f"--steps={ASYNC_STEPS}", "--pause=0.1", "--replay-bytes=4000"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words)
    kills = [(0, 3), (1, 9), (0, 16)]
    job.run({(0, step): partial(job.kill_server, server, away_s=1.0) for server, step in kills})
    assert job.starts == [3, 2]
    assert lowest(job.results()) == {-2.0 * ASYNC_STEPS}


@pytest.mark.parametrize("server", [0, 1])
def test_a_killed_server_is_not_waited_for_while_gradients_wait_to_be_merged(
    server: int, tmp_path: Path
) -> None:
    # While a pull is under way, gradients are merged, and rows of a table are sent without them.
    lost: set[str] = set()

    def loses_pulls(endpoint: str, message: Message) -> int:
        if (message.sender, message.kind, message.step) != ("trainer 0", Kind.PULL, 5):
            return 1
        is_first = endpoint not in lost
        lost.add(endpoint)
        return 0 if is_first else 1

    words = ["--kind=count_rows", "--communication=async", "--merge=4", "--staleness=8"]
    words += [f"--steps={STEPS}", "--pause=0.1", "--step-timeout=30"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words, faults=loses_pulls)
    job.run({(0, 7): partial(job.kill_server, server, away_s=1.0)})
    assert lowest(job.results()) == {-2.0 * STEPS}


@pytest.mark.grid
def test_a_full_disk_holds_up_no_trainer_whose_gradients_wait_to_be_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While servers may be asked again, a trainer holds gradients that travel with later steps.
    full, save = [True], RecoveryCheckpoints.save

    def guarded(
        own: RecoveryCheckpoints, plan: Any, arrays: Any, progress: Any, **named: Any
    ) -> Any:
        if full and progress.number > 0:
            error = OSError(errno.ENOSPC, "No space left on device")
            raise cannot_write("part 'server 0'", Path("/somewhere"), error) from error
        return save(own, plan, arrays, progress, **named)

    monkeypatch.setattr(RecoveryCheckpoints, "save", guarded)
    merged = ("--kind=count", "--communication=half_async", "--merge=3", "--staleness=9")
    words = [*merged, "--steps=120", "--pause=0.11", "--step-timeout=30", "--replay-bytes=4000"]
    job = TrainingJob(tmp_path, returns_s=30.0, step_s=30.0, options=words)
    job.at_s(8.0, full.clear)
    job.run()
    assert lowest(job.results()) == {-2.0 * 120 / 3}
    assert job.ends["trainer 0"].at_s < 120 * 0.11 + 5.0


def test_a_stopped_trainer_is_waited_for_at_the_bound() -> None:
    words = [*ASYNC, f"--steps={ASYNC_STEPS}", "--pause=0.05"]
    job = TrainingJob(servers=1, step_s=30.0, options=words)
    # Long enough to pass the bound, too short to be lost.
    job.run({(1, 5): partial(job.stop, "trainer 1", LOST_S - 0.5)})
    job.results()
    found = [job.ends[f"trainer {trainer}"].stats["staleness"] for trainer in range(2)]
    assert found[0]["max"] == BOUND  # it reached the bound and waited
    assert found[1]["max"] <= BOUND


def test_a_killed_trainer_is_named_when_the_bound_is_reached() -> None:
    words = [*ASYNC, "--steps=500", "--pause=0.05"]
    job = TrainingJob(servers=1, step_s=30.0, options=words).run({(1, 3): kill})
    text = job.error("trainer 0", PeerLostError)
    assert "trainer 1 is lost" in text
    assert "for its step" in text


def test_a_trainer_that_ends_early_is_not_waited_for() -> None:
    words = [*ASYNC, f"--steps={ASYNC_STEPS}", "--pause=0.02", "--stop-at=6"]
    job = TrainingJob(servers=1, step_s=30.0, options=words).run()
    assert lowest(job.results()[:1]) == {-(ASYNC_STEPS + 5.0)}


@pytest.mark.grid
def test_rows_go_with_the_parameters_of_an_exchange_before_it_is_due() -> None:
    # A trainer without samples takes steps without gradients, and then the first step of a window:
    # its values are too old for the next one, so it exchanges. Without its rows, the step would
    # not be complete, and the trainer would wait for itself.
    job = TrainingJob(options=[*options("geo"), f"--steps={STEPS}", "--staleness=4"], trainers=1)

    def between(step: Any, state: Any, done: int) -> Any:
        if done == EVERY:
            step._advance(done + 4)  # noqa: SLF001  # as at the end of the samples
        return state

    job.between = between
    job.run()
    (result,) = job.results()
    assert lowest([{name: x for name, x in result.items() if "rows" not in name}]) == {-STEPS}
