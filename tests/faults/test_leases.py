"""Trainers lease samples in the relaxed modes: each is applied once, whatever process dies."""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint import CheckpointSeries, open_checkpoint, read_position
from jaxfleet.data import Loader
from jaxfleet.env import PeriodicSaves, SaveInterval
from jaxfleet.errors import FeedError, PeerLostError, ProgramError, StrategyError
from jaxfleet.transport.memory_network import Faults, MemoryConnections
from jaxfleet.transport.messages import Kind, Message
from tests.faults.cluster import LOST_S
from tests.faults.memory_jobs import NEVER_S, kill
from tests.faults.memory_leases import SAMPLES, LeasingJob
from tests.tiers import by_default

ONCE = [1.0] * SAMPLES
UNBOUNDED = {"staleness": 1000}  # the others do not wait for a trainer that is gone
MESSAGES = [*range(1, 16), *range(16, 60, 3)]
MODES: dict[str, dict[str, Any]] = {
    "async": {"merge": 4, "staleness": 6},
    "half_async": {"merge": 3, "staleness": 6},
    "dc_asgd": {"delay_compensation": 0.0},
    "geo": {"k_steps": 3, "staleness": 6},
}


def once(*epochs: int) -> list[dict[str, int]]:
    return [{"epoch": epoch, "once": SAMPLES, "twice": 0, "never": 0} for epoch in epochs]


def taken(job: LeasingJob) -> set[int]:
    """Returns how often samples were taken."""
    batches = itertools.chain(*job.took.values())
    return set(Counter(itertools.chain(*batches)).values())


def steps(job: LeasingJob) -> set[int]:
    return {job.ends[f"trainer {n}"].stats["trainer"]["step"] for n in range(job.trainers)}


@pytest.mark.parametrize("mode", MODES)
def test_trainers_of_different_speeds_share_all_epochs(mode: str) -> None:
    strategy = {"communication": mode, **MODES[mode]}
    job = LeasingJob(step_s=30.0, epochs=2, pauses=(0.1, 0.37), strategy=strategy).run()
    job.results()
    assert job.data["epochs"] == once(0, 1)
    assert taken(job) == {2}
    assert len(job.took[0]) > len(job.took[1])
    assert steps(job) == {len(job.took[0])}  # the other went on to the same step
    for number in range(2):
        staleness = job.ends[f"trainer {number}"].stats["trainer"]["staleness"]
        assert staleness["max"] <= staleness["bound"]
    if mode in {"async", "dc_asgd"}:  # the others weigh gradients
        assert set(job.counts().tolist()) == {2.0}


@pytest.mark.few(3)
@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("step", range(1, 12))
def test_a_server_that_is_started_again_forgets_no_lease(
    server: int, step: int, tmp_path: Path
) -> None:
    job = LeasingJob(tmp_path, returns_s=30.0, step_s=30.0)
    job.run({(0, step): partial(job.kill_server, server, away_s=1.0)})
    assert job.starts[server] == 2
    assert job.counts().tolist() == ONCE
    assert job.data["epochs"] == once(0)


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [2, 5, 8])
def test_a_restarted_server_forgets_no_lease_of_merged_steps(
    mode: str, step: int, tmp_path: Path
) -> None:
    strategy = {"communication": mode, **MODES[mode]}
    job = LeasingJob(tmp_path, returns_s=30.0, step_s=30.0, epochs=2, strategy=strategy)
    job.run({(0, step): partial(job.kill_server, 0, away_s=1.0)})
    job.results()
    assert job.data["epochs"] == once(0, 1)
    assert taken(job) == {2}


@pytest.mark.parametrize("number", by_default(MESSAGES, 4, 6, 15, 22, 34, 49))
def test_server_0_killed_at_any_message_forgets_no_lease(number: int, tmp_path: Path) -> None:
    job = LeasingJob(tmp_path, returns_s=30.0, step_s=30.0)
    sent = 0

    def look(_: int, server: int, __: Message) -> None:
        nonlocal sent
        sent += server == 0
        if sent == number and job.starts[0] == 1:
            job.kill_server(0, away_s=1.0)

    job.on_send = look
    job.run()
    assert job.counts().tolist() == ONCE
    assert job.data["epochs"] == once(0)


def dying(number: int, job: LeasingJob, *, away_s: float = NEVER_S) -> None:
    """Kills trainer 1 before its nth message, unless that is its bye."""
    sent = 0

    def look(trainer: int, _: int, message: Message) -> None:
        nonlocal sent
        sent += trainer == 1
        if trainer == 1 and sent == number and message.kind is not Kind.BYE:
            kill(away_s)

    job.on_send = look


@pytest.mark.parametrize("number", by_default(MESSAGES, 5, 11, 12, 13, 14, 31, 40))
def test_samples_of_a_trainer_killed_at_any_message_are_leased_again(number: int) -> None:
    job = LeasingJob(step_s=10.0, strategy=UNBOUNDED, pauses=(0.3, 0.1))
    dying(number, job)
    job.run()
    end = job.ends["trainer 0"]
    assert end.error is None
    # Server 0, which has the first half, applied each sample once. Server 1 lacks those of a push
    # that only server 0 received, and has those twice that only it received.
    counts = end.state["counts"]
    assert counts[: SAMPLES // 2].tolist() == ONCE[: SAMPLES // 2]
    assert np.sum(counts != 1.0) <= 2
    assert job.data["epochs"] == once(0)


@pytest.mark.few(3)
@pytest.mark.parametrize("trainer_message", range(5, 45, 4))
@pytest.mark.parametrize("server_step", [2, 4, 7])
def test_a_lost_trainer_and_a_lost_server_leave_each_sample_once_on_server_0(
    trainer_message: int, server_step: int, tmp_path: Path
) -> None:
    job = LeasingJob(tmp_path, returns_s=30.0, step_s=30.0, strategy=UNBOUNDED, pauses=(0.3, 0.1))
    dying(trainer_message, job)
    job.run({(0, server_step): partial(job.kill_server, 0, away_s=1.0)})
    end = job.ends["trainer 0"]
    assert end.error is None
    assert end.state["counts"][: SAMPLES // 2].tolist() == ONCE[: SAMPLES // 2]
    assert job.data["epochs"] == once(0)


@pytest.mark.few(3)
@pytest.mark.parametrize("at", [0, 2, 7])
@pytest.mark.parametrize("kind", [Kind.LEASE, Kind.OK, Kind.PUSH, Kind.HELLO])
def test_a_lost_or_repeated_message_changes_nothing(kind: Kind, at: int) -> None:
    for copies in (0, 2):
        seen = itertools.count()

        def faults(_: str, message: Message, copies: int = copies, seen: Any = seen) -> int:
            return copies if message.kind is kind and next(seen) == at else 1

        check: Faults = faults
        job = LeasingJob(step_s=60.0, strategy=UNBOUNDED, faults=check).run()
        assert job.counts().tolist() == ONCE
        assert job.data["epochs"] == once(0)


def test_samples_of_a_trainer_that_was_only_silent_are_reported_twice() -> None:
    job = LeasingJob(step_s=60.0, strategy=UNBOUNDED, pauses=(0.4, 0.1))
    job.run({(1, 3): partial(job.stop, "trainer 1", LOST_S + 3.0)})
    counts = Counter(job.counts().tolist())
    reported = job.data["epochs"][0]
    assert counts[2.0] > 0
    assert reported == {"epoch": 0, "once": counts[1.0], "twice": counts[2.0], "never": 0}


def test_a_batch_that_the_script_skips_is_not_leased_again() -> None:
    job = LeasingJob(step_s=30.0)
    job.skipped = {(0, 2), (1, 12), (0, 12), (0, 13)}  # the last ones, too
    job.run()
    assert taken(job) == {1}
    assert job.data["epochs"] == once(0)
    missing = job.counts().tolist().count(0.0)
    assert missing == 2 * sum(number <= len(job.took[trainer]) for trainer, number in job.skipped)


def test_a_trainer_that_leaves_early_gives_its_leases_back() -> None:
    job = LeasingJob(step_s=30.0)

    def leave(_trainer: int, number: int, step: Any, state: Any) -> Any:
        if _trainer == 1 and number == 3:
            step.close()
            kill()
        return state

    job.after_step = leave
    job.run()
    assert job.ends["trainer 0"].state["counts"].tolist() == ONCE
    assert job.data["epochs"] == once(0)


@pytest.mark.grid
def test_a_position_is_taken_up_by_another_number_of_trainers(tmp_path: Path) -> None:
    pauses = (0.1, 0.23, 0.05)
    paths = [tmp_path / name for name in "abc"]
    restored = None
    for path, trainers in zip(paths, (2, 3, 1), strict=True):
        job = LeasingJob(
            step_s=30.0, trainers=trainers, batch_size=6, epochs=2, restored=restored, pauses=pauses
        )
        before = 0 if restored is None else step_of(restored)

        def save(
            _: int, number: int, step: Any, state: Any, path: Path = path, before: int = before
        ) -> Any:
            if step.client.step == before + 3:
                step.save(path, state)
            return state

        job.after_step = save
        job.run()
        # Whoever goes on trains on exactly what the checkpoint lacks.
        assert set(job.counts().tolist()) == {2.0}
        assert job.data["epochs"] == once(0, 1)
        restored = path


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint."""
    return open_checkpoint(path).step


def test_a_checkpoint_after_all_epochs_has_nothing_left(tmp_path: Path) -> None:
    LeasingJob(step_s=30.0, saved=tmp_path / "c").run().results()
    position = read_position(tmp_path / "c")
    assert position["ledger"]["epoch"] == 1  # type: ignore[index]
    again = LeasingJob(step_s=30.0, restored=tmp_path / "c", epochs=2).run()
    assert set(again.counts().tolist()) == {2.0}
    assert sum(map(len, again.took.values())) == SAMPLES // 2


def test_trainers_without_samples_take_part_in_periodic_checkpoints(tmp_path: Path) -> None:
    saves = PeriodicSaves(tmp_path, SaveInterval.parse("7steps"), 9)
    job = LeasingJob(step_s=30.0, saves=saves, pauses=(0.05, 0.6), strategy=UNBOUNDED).run()
    assert job.counts().tolist() == ONCE
    series = CheckpointSeries(tmp_path / "train_step", keep=9)
    assert series.steps() == (7, 14)
    assert len(job.took[0]) > 13 > len(job.took[1])  # the other had no samples for step 14
    again = LeasingJob(step_s=30.0, restored=series.path(7)).run()
    assert again.counts().tolist() == ONCE


@pytest.mark.grid
def test_a_trainer_that_never_pushes_is_named_by_those_who_wait() -> None:
    job = LeasingJob(step_s=4.0, strategy=UNBOUNDED, pauses=(0.1, 500.0)).run()
    text = job.error("trainer 0", PeerLostError)
    assert "for samples, which trainer 1 leased and did not push" in text


def test_another_loader_of_the_same_job_is_refused() -> None:
    job = LeasingJob(step_s=10.0)

    def read_another(trainer: int, number: int, step: Any, state: Any) -> Any:
        if trainer == 0 and number == 3:
            other = Loader(np.arange(9), 2, batch="local", part=(0, 2))
            next(iter(step.batches(other)))
        return state

    job.after_step = read_another
    job.run()
    text = job.error("trainer 0", ProgramError)
    assert "the loader has samples=9 instead of 48" in text


def test_a_restored_position_of_another_loader_is_refused(tmp_path: Path) -> None:
    LeasingJob(step_s=10.0, saved=tmp_path / "c").run().results()
    job = LeasingJob(step_s=10.0, restored=tmp_path / "c", batch_size=8).run()
    text = job.error("trainer 0", ProgramError)
    assert "the loader has batch_size=8 instead of 4, with which the job or its checkpoint" in text
    with pytest.raises(FeedError, match="whose trainers leased their samples"):
        Loader(np.arange(SAMPLES), 4).from_checkpoint(tmp_path / "c")


def test_leases_need_batches_of_each_trainers_own() -> None:
    job = LeasingJob(step_s=4.0, strategy={"batch": "global"}).run()
    assert "the strategy's batch is 'global'" in job.error("trainer 0", StrategyError)


def test_a_lease_that_arrives_from_a_servers_earlier_life_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trainer reads it when it has declared its leases to the server's new life.
    late: list[tuple[MemoryConnections, int, Message]] = []
    job = LeasingJob(tmp_path, returns_s=30.0, step_s=30.0)
    put = MemoryConnections.put

    def put_late(connections: MemoryConnections, server: int, message: Message) -> None:
        steps = len(job.took[0])
        if message.body.get("leases") and steps > 4 and not late and job.starts[0] == 1:
            late.append((connections, server, message))
            job.kill_server(0, away_s=1.0)
            return
        if message.kind is Kind.WELCOME and job.starts[0] == 2 and server == 0:
            for each in [each for each in late if each[0] is connections]:
                put(*each)
        put(connections, server, message)

    monkeypatch.setattr(MemoryConnections, "put", put_late)
    job.run()
    assert late
    assert job.starts[0] == 2
    assert job.counts().tolist() == ONCE
    assert job.data["epochs"] == once(0)
