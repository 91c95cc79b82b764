"""A server that is killed and restarted changes nothing, whenever it is killed."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import PeerLostError
from jaxfleet.ps.server import ServerCore
from jaxfleet.transport.messages import Kind, Message
from tests.faults.cluster import LOST_S, check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_jobs import KilledError
from tests.faults.memory_training import TrainingJob
from tests.tiers import by_default

STEPS = 14
RETURNS_S = 30.0
AWAY_S = 1.0


def returning(folder: Path, kind: str, *options: str, steps: int = STEPS) -> TrainingJob:
    words = [f"--kind={kind}", f"--steps={steps}", "--pause=0.15", "--step-timeout=30", *options]
    return TrainingJob(folder, returns_s=RETURNS_S, step_s=30.0, options=words)


@pytest.mark.grid
@pytest.mark.parametrize(
    "kind",
    ["plain", "clip", "clip_after", "clip_twice", "norm", "table"],
)
def test_servers_killed_one_after_the_other_change_nothing(
    kind: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # The first dies right after the first checkpoint, of the initial state; the second has several
    # steps to catch up; then the first again, after a forced checkpoint.
    job = returning(tmp_path, kind, "--replay-bytes=4000")
    kills = [(0, 1), (1, 5), (0, 9)]
    job.run({(0, step): partial(job.kill_server, server, away_s=AWAY_S) for server, step in kills})
    check_same(job.results(), undisturbed(kind, STEPS))
    assert job.starts == [3, 2]
    saved = {path.name for path in (tmp_path / "server0").glob("step-*")}
    # Later ones replaced it; those of tables are incremental.
    assert ("step-00000000" in saved) == (kind == "table")
    assert len(saved) > 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "count", by_default([*range(1, 20, 2), *range(20, 72, 8)], 1, 5, 9, 13, 17, 28, 44, 60)
)
def test_a_server_killed_at_any_message_changes_nothing(
    count: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # The norm of all gradients is exchanged between servers, so the other one waits for this one.
    carried = 0

    def count_messages(endpoint: str, _: Message) -> int:
        nonlocal carried
        carried += endpoint == job.endpoints[0]
        if carried == count and endpoint == job.endpoints[0]:
            job.kill_server(0, away_s=AWAY_S)
        return 1

    words = ["--kind=clip", "--steps=4", "--pause=0.15", "--step-timeout=30"]
    job = TrainingJob(
        tmp_path, returns_s=RETURNS_S, step_s=30.0, options=words, faults=count_messages
    )
    job.run()
    assert job.starts == [2, 1]
    check_same(job.results(), undisturbed("clip", 4))


@pytest.mark.parametrize("which", [1, 2])
def test_a_server_killed_as_trainers_say_bye_ends_with_the_job(
    which: int, tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One trainer has said bye to it and leaves; or both have, and none will ever return.
    byes: list[str] = []

    def count_byes(endpoint: str, message: Message) -> int:
        if endpoint == job.endpoints[0] and message.kind is Kind.BYE:
            byes.append(message.sender)
        answered = message.kind is Kind.OK and message.sender == "server 0"
        if answered and len(byes) == which and job.starts[0] == 1:
            job.kill_server(0, away_s=4.0)
        return 1

    if which == 2:
        monkeypatch.setattr(ServerCore, "end", lambda _: None)  # a killed server cannot do this
    words = ["--kind=clip", "--steps=4", "--pause=0.15", "--step-timeout=30", "--lost-after=5"]
    job = TrainingJob(tmp_path, returns_s=RETURNS_S, step_s=30.0, options=words, faults=count_byes)
    job.run()
    assert job.starts == [2, 1]
    check_same(job.results(), undisturbed("clip", 4))
    assert job.ends["server 0"].at_s < job.ends["trainer 0"].at_s + 10.0
    assert bool([*tmp_path.glob("*/byes.json")]) == (which == 2)


def killed_at_the_end(folder: Path, which: int, launch_id: str | None) -> TrainingJob:
    """Returns a job whose servers are both killed for good, at the first or the second bye."""
    byes: dict[str, set[int]] = {}
    answered: Counter[str] = Counter()

    def count_byes(endpoint: str, message: Message) -> int:
        numbers = byes.setdefault(endpoint, set())
        if message.kind is Kind.BYE:
            numbers.add(message.number)
        if message.kind is Kind.OK and message.number in numbers:
            answered[endpoint] += 1
            if answered[endpoint] == which:
                job.kill_server(job.endpoints.index(endpoint))
        return 1

    words = ["--kind=clip", "--steps=4", "--step-timeout=8"]
    more: dict[str, Any] = {"options": words, "faults": count_byes, "launch_id": launch_id}
    job = TrainingJob(folder / "own", returns_s=2.0, saved=folder / "saved", **more)
    return job.run()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "ids",
    by_default(
        [("first", "second"), (None, None), ("first", None)], ("first", "second"), (None, None)
    ),
)
@pytest.mark.parametrize("which", [1, 2])
def test_a_job_that_runs_again_after_a_kill_at_its_end_is_served(
    which: int, ids: tuple[str | None, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ServerCore, "end", lambda _: None)  # a killed server cannot do this
        killed_at_the_end(tmp_path, which, ids[0])
    assert len([*tmp_path.glob("own/*/byes.json")]) == 2

    def run_again(folder: str) -> list[dict[str, np.ndarray]]:
        options = ["--kind=clip", "--steps=2", "--step-timeout=30"]
        more: dict[str, Any] = {"options": options, "launch_id": ids[1]}
        more["restored"] = tmp_path / "saved"
        job = TrainingJob(tmp_path / folder, returns_s=20.0, step_s=30.0, **more)
        # Trainers take their time to arrive, and the one that had not left arrives first.
        job.stop("trainer 0", 5.0)
        job.stop("trainer 1", 3.0)
        return job.run().results()

    check_same(run_again("own"), run_again("another")[0])
    assert not [*tmp_path.glob("own/*/byes.json")]


def test_a_server_without_a_launch_id_ends_when_no_trainer_of_another_run_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ServerCore, "end", lambda _: None)
        killed_at_the_end(tmp_path, 2, None)
    folder = tmp_path / "own"
    job = TrainingJob(folder, trainers=0, returns_s=20.0, step_s=30.0, launch_id=None).run()
    assert [job.ends[f"server {number}"].error for number in range(2)] == [None, None]
    assert 30.0 < job.ends["server 0"].at_s < 32.0


@pytest.mark.grid
def test_a_server_that_is_lost_late_says_bye_all_the_same(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    carried = 0

    def kill_at_the_end(endpoint: str, _: Message) -> int:
        nonlocal carried
        carried += endpoint == job.endpoints[0]
        if carried == 68 and endpoint == job.endpoints[0]:
            job.kill_server(0, away_s=AWAY_S)
        return 1

    words = ["--kind=clip", "--steps=4", "--pause=0.15", "--step-timeout=30", "--lost-after=5"]
    job = TrainingJob(
        tmp_path, returns_s=RETURNS_S, step_s=30.0, options=words, faults=kill_at_the_end
    )
    job.run()
    check_same(job.results(), undisturbed("clip", 4))


@pytest.mark.grid
def test_a_server_killed_before_it_has_a_state_receives_it_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = returning(tmp_path, "norm")
    job.stop("trainer 0", 4.0)  # it provides the initial state of servers; the other one waits
    job.at_s(2.0, partial(job.kill_server, 0, away_s=AWAY_S))
    job.run()
    assert job.starts == [2, 1]
    check_same(job.results(), undisturbed("norm", STEPS))


def test_a_server_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    words = ["--steps=500", "--pause=0.1"]
    job = TrainingJob(tmp_path, servers=1, returns_s=3.0, options=words)
    killed_s: list[float] = []

    def kill() -> None:
        killed_s.append(job.network.clock())
        job.kill_server(0)

    job.run({(0, 3): kill})
    for trainer in range(2):
        text = job.error(f"trainer {trainer}", PeerLostError)
        assert "server 0 at 127.0.0.1:" in text
        assert "was lost at step 4" in text
        assert f"trainer {trainer} waited for" in text
        assert "its last reported 'after step" in text
        waited_s = job.ends[f"trainer {trainer}"].at_s - killed_s[0]
        assert LOST_S + 3.0 - 1.0 < waited_s < LOST_S + 3.0 + 1.0
    job.error("server 0", KilledError)


def test_a_server_that_lost_its_state_is_refused(tmp_path: Path) -> None:
    words = ["--steps=500", "--pause=0.1"]
    folder = tmp_path / "own"
    job = TrainingJob(folder, servers=1, returns_s=RETURNS_S, step_s=30.0, options=words)

    def lose() -> None:
        job.kill_server(0, away_s=AWAY_S)
        folder.rename(tmp_path / "lost")

    job.run({(0, 3): lose})
    for trainer in range(2):
        text = job.error(f"trainer {trainer}", PeerLostError)
        assert "server 0" in text
        assert "came back without a state" in text
