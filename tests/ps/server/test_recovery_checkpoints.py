"""A server's own checkpoints: automatic, retried after a full disk, or damaged."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint import PartReceipt, commit
from jaxfleet.checkpoint.saving import cannot_write, is_disk_full
from jaxfleet.errors import CheckpointError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.replay_log import ReplayLog
from jaxfleet.ps.client.server_session import ServerSession
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server import ServerOptions
from jaxfleet.ps.server.checkpoints import RecoveryCheckpoints
from jaxfleet.ps.server.outbox import DeviceTask
from jaxfleet.ps.server.peer_state import Departures
from jaxfleet.ps.server.recovery_saver import SaveSchedule
from jaxfleet.ps.server.trainer_sessions import DepartureRecord
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind, Message, Plain, Tensor
from tests.ps.server.common import SGD, Bench, hello, sgd_after, sgd_grads, sgd_state


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_checkpoint_is_due_before_replay_takes_long() -> None:
    schedule = SaveSchedule(Clock())
    schedule.saved(0, 0.0, 0.0)
    assert not schedule.is_due(0, 0.0)
    assert not schedule.is_due(50, 0.1)
    assert schedule.is_due(100, 0.0)  # a hundred steps of almost no cost
    assert schedule.is_due(3, 1.0)  # three expensive ones


def test_a_checkpoint_is_due_when_messages_take_long() -> None:
    schedule = SaveSchedule(Clock())
    schedule.saved(0, 0.0, 0.0, 5.0)
    assert not schedule.is_due(3, 0.1, 5.9)
    assert schedule.is_due(4, 0.1, 6.1)  # four steps of 0.27 s, of which blocks take 0.03


def test_a_save_that_steps_wait_for_does_not_count_as_replay() -> None:
    clock = Clock()
    schedule = SaveSchedule(clock)
    schedule.saved(0, 0.0, 0.5)
    clock.now = 20.0
    assert not schedule.is_due(3, 0.1, 1.4)  # of which the trainers waited 0.5 s for the save
    assert schedule.is_due(3, 0.1, 1.6)


def test_pushes_report_the_time_of_messages_which_brings_a_checkpoint_forward(
    tmp_path: Path,
) -> None:
    options = ServerOptions(server=0, checkpoint_dir=tmp_path, lost_after_s=500)
    bench = Bench(options).started(SGD, sgd_state())
    saved = []
    for step in (1, 2, 3):
        for trainer, took_s in ((0, 0.9), (1, 0.4)):  # trainer 0 also waits for trainer 1
            bench.now += 1.0
            bench.send(trainer, Kind.PUSH, step, {"took_s": took_s}, sgd_grads(trainer, step))
        saved.append(bench.core.metrics(bench.now).counted["saved"])
    assert saved == [0, 0, 3]  # 0.4 s a step


def test_a_checkpoint_is_due_after_some_seconds_however_few_steps_were_made() -> None:
    clock = Clock()
    schedule = SaveSchedule(clock)
    schedule.saved(0, 0.0, 0.0)
    clock.now = 29.0
    assert not schedule.is_due(1, 0.0)
    clock.now = 31.0
    assert schedule.is_due(1, 0.0)
    assert not schedule.is_due(0, 0.0)  # it would have the same content


def test_saves_take_a_twentieth_of_the_time_unless_replay_would_take_too_long() -> None:
    clock = Clock()
    schedule = SaveSchedule(clock)
    schedule.saved(0, 0.0, 4.0)
    clock.now = 79.0
    assert not schedule.is_due(1, 1.2)
    clock.now = 81.0
    assert schedule.is_due(1, 1.2)


def test_a_save_beside_the_steps_begins_so_that_its_end_comes_in_time() -> None:
    clock = Clock()
    schedule = SaveSchedule(clock)
    clock.now = 1.0
    schedule.saved(0, 0.0, 1.0)  # of the state at 0
    clock.now = 5.9
    assert not schedule.is_due(10, 0.9, beside=True)  # writing has its share of the time
    clock.now = 6.1
    assert schedule.is_due(10, 0.8, beside=True)  # 1.05 when it is complete
    assert not schedule.is_due(10, 0.7, beside=True)
    assert not schedule.is_due(0, 0.0, beside=True)
    assert not schedule.is_due(10, 0.8)


def test_saves_beside_the_steps_follow_each_other_where_replay_would_take_too_long() -> None:
    clock = Clock()
    schedule = SaveSchedule(clock)
    clock.now = 1.0
    schedule.saved(0, 0.0, 1.0)
    clock.now = 1.9
    assert not schedule.is_due(10, 1.0, beside=True)
    clock.now = 2.1
    assert schedule.is_due(10, 1.0, beside=True)  # 1.62 when it is complete


def test_a_large_state_is_saved_before_replay_takes_two_seconds() -> None:
    clock = Clock()
    schedule = SaveSchedule(clock)
    schedule.saved(0, 0.0, 0.3)  # as 100 MB take
    clock.now = 1.1
    assert not schedule.is_due(3, 1.6)  # at most a fifth of the time
    clock.now = 1.3
    assert not schedule.is_due(3, 1.3)
    assert schedule.is_due(3, 1.6)


def test_a_save_that_failed_is_tried_again_later_and_later() -> None:
    schedule = SaveSchedule(Clock())
    assert [schedule.failed() for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    schedule.saved(1, 0.0, 0.0)
    assert schedule.failed() == 5.0


def started(folder: Path) -> Bench:
    """Starts or restarts a server that keeps checkpoints."""
    bench = Bench(ServerOptions(server=0, checkpoint_dir=folder, lost_after_s=600.0))
    welcomes = [bench.one(t, Kind.HELLO, body=hello(t)) for t in (0, 1)]
    if not welcomes[0].body["defined"]:
        bench.one(0, Kind.DEFINE, body={"program": SGD})
        bench.one(0, Kind.ASSIGN, 0, {"replace": False}, sgd_state())
    return bench


def train(bench: Bench, steps: range) -> None:
    for step in steps:
        for trainer in (0, 1):
            bench.push(trainer, step, sgd_grads(trainer, step))


def saved(bench: Bench) -> Any:
    return bench.one(0, Kind.HEARTBEAT, body={"doing": "asking"}).body["saved"]


def test_a_server_writes_checkpoints_that_no_trainer_asks_for(tmp_path: Path) -> None:
    bench = started(tmp_path)
    train(bench, range(1, 121))
    assert 60 <= saved(bench) <= 120
    again = started(tmp_path)
    assert again.core.step == saved(bench)
    train(again, range(again.core.step + 1, 121))
    np.testing.assert_array_equal(again.pull(0, 120, "b")["b"], sgd_after(120)["b"])


def run_until_saving(bench: Bench) -> DeviceTask:
    """Runs until a checkpoint is to be written in the background; returns that task."""
    while True:
        for job in bench.core.take_tasks():
            if job.is_beside:
                return job
            result, error = job.attempt()
            assert error is None
            bench.core.finish(job, result)


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    bench = started(tmp_path)
    train(bench, range(1, 3))
    bench.now += 31.0  # one is due
    bench.push(0, 3, sgd_grads(0, 3))
    bench.send(1, Kind.PUSH, 3, arrays=sgd_grads(1, 3), run=False)
    saving = run_until_saving(bench)
    train(bench, range(4, 7))
    np.testing.assert_array_equal(bench.pull(0, 6, "b")["b"], sgd_after(6)["b"])
    assert bench.send(0, Kind.SAVE, 6) == []  # it waits for the current one
    assert saved(bench) == 0
    result, error = saving.attempt()
    assert error is None
    bench.core.finish(saving, result)
    again = started(tmp_path)
    assert again.core.step == 3  # of the state when the writing began
    np.testing.assert_array_equal(again.pull(0, 3, "b")["b"], sgd_after(3)["b"])
    ((_, answer),) = bench.core.run_tasks()
    assert (answer.kind, answer.body["step"], saved(bench)) == (Kind.OK, 6, 6)


def test_a_save_of_a_step_that_a_checkpoint_holds_writes_no_other(tmp_path: Path) -> None:
    bench = started(tmp_path)
    train(bench, range(1, 5))
    assert "receipt" in bench.one(0, Kind.SAVE, 4).body
    assert bench.one(1, Kind.SAVE, 4).body == {"step": 4}
    train(bench, range(5, 7))
    assert bench.one(1, Kind.SAVE, 4).body == {"step": 4}
    assert saved(bench) == 4


def test_a_replaced_state_is_written_after_what_is_being_written(tmp_path: Path) -> None:
    bench = started(tmp_path)
    train(bench, range(1, 3))
    bench.now += 31.0
    bench.push(0, 3, sgd_grads(0, 3))
    bench.send(1, Kind.PUSH, 3, arrays=sgd_grads(1, 3), run=False)
    saving = run_until_saving(bench)
    values = {name: np.full_like(array, 7.0) for name, array in sgd_state().items()}
    for trainer in (0, 1):
        assert bench.send(trainer, Kind.ASSIGN, 3, {"replace": True}, values) == []
    result, error = saving.attempt()
    assert error is None
    replies = [*bench.core.finish(saving, result), *bench.core.run_tasks()]
    assert [message.kind for _, message in replies] == [Kind.OK, Kind.OK]
    again = started(tmp_path)
    np.testing.assert_array_equal(again.pull(0, 3, "b")["b"], values["b"])


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Makes checkpoints fail as on a full disk while the set is not empty."""
    full, save = {"full"}, RecoveryCheckpoints.save

    def guarded(own: RecoveryCheckpoints, *args: Any, **named: Any) -> Any:
        if full:
            error = OSError(errno.ENOSPC, "No space left on device")
            raise cannot_write("part 'server 0'", Path("/somewhere"), error) from error
        return save(own, *args, **named)

    monkeypatch.setattr(RecoveryCheckpoints, "save", guarded)
    return full


def test_a_full_disk_is_warned_of_and_tried_again(
    tmp_path: Path, full_disk: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    bench = started(tmp_path)  # its initial state has no checkpoint
    assert "it is tried again in 5 s" in caplog.text
    train(bench, range(1, 3))
    assert bench.one(0, Kind.SAVE, 2).body == {"is_full": True}
    assert bench.core.failure is None
    full_disk.clear()
    bench.now += 6.0
    assert bench.one(0, Kind.SAVE, 2).body["step"] == 2
    assert saved(bench) == 2
    assert started(tmp_path).core.step == 2


def replacing(bench: Bench, state: dict[str, np.ndarray]) -> list[Message]:
    """Replaces the state after step 2; returns the answers."""
    body: dict[str, Plain] = {"replace": True}
    return [reply for t in (0, 1) for _, reply in bench.send(t, Kind.ASSIGN, 2, body, state)]


def replace_on_full_disk(folder: Path, full_disk: set[str], way: str) -> Bench:
    """Starts a server, and replaces the state of its step 2 by one that does not fit its disk."""
    full_disk.clear()
    bench, path = started(folder / "own"), folder / "job"
    receipt = bench.one(0, Kind.SAVE, 0, {"path": str(path)}).body["receipt"]
    assert isinstance(receipt, dict)
    commit(path, [PartReceipt.from_plain(receipt)], step=0)
    train(bench, range(1, 3))
    assert bench.one(0, Kind.SAVE, 2).body["step"] == 2
    full_disk.add("full")
    if way == "load":
        assert not bench.send(0, Kind.LOAD, 0, {"path": str(path)})
    else:
        assert not replacing(bench, sgd_state())
    return bench


@pytest.mark.parametrize("way", ["load", "replace"])
def test_a_replaced_state_waits_for_space_on_a_full_disk(
    tmp_path: Path, full_disk: set[str], way: str
) -> None:
    bench = replace_on_full_disk(tmp_path, full_disk, way)
    assert bench.wait(3.0) == []
    assert bench.core.run_tasks() == []  # it is still full
    full_disk.clear()
    bench.wait(3.0)
    answers = [reply for _, reply in bench.core.run_tasks()]
    assert {answer.kind for answer in answers} == {Kind.OK}
    again = started(tmp_path / "own")
    step = 0 if way == "load" else 2
    assert again.core.step == step
    np.testing.assert_array_equal(again.pull(0, step, "b")["b"], sgd_state()["b"])


@pytest.mark.parametrize("way", ["load", "replace"])
def test_a_state_that_a_full_disk_has_no_room_for_is_an_error(
    tmp_path: Path, full_disk: set[str], way: str
) -> None:
    bench, answers = replace_on_full_disk(tmp_path, full_disk, way), list[Message]()
    began = bench.now
    while bench.core.failure is None:
        assert bench.now < began + 15.0
        bench.wait(2.1)
        answers += [reply for _, reply in bench.core.run_tasks()]
    assert {answer.kind for answer in answers} == {Kind.ERROR}
    assert all("No space left on device" in str(answer.body["what"]) for answer in answers)
    assert bench.core.failure is not None
    again = started(tmp_path / "own")
    assert again.core.step == 2
    np.testing.assert_array_equal(again.pull(0, 2, "b")["b"], sgd_after(2)["b"])


def test_a_state_that_was_replaced_is_not_saved_because_the_one_before_it_was(
    tmp_path: Path,
) -> None:
    bench = started(tmp_path)
    train(bench, range(1, 3))
    assert "files" in bench.one(0, Kind.SAVE, 2).body
    assert "files" not in bench.one(0, Kind.SAVE, 2).body
    for trainer in (0, 1):
        bench.send(trainer, Kind.ASSIGN, 2, {"replace": True}, sgd_state(), run=False)
    answer = bench.send(0, Kind.SAVE, 2, run=False)
    assert not answer  # the new values come first
    answers = [reply for _, reply in bench.core.run_tasks()]
    assert [answer.kind for answer in answers] == [Kind.OK] * 3
    assert sum("files" in answer.body for answer in answers) == 1
    again = started(tmp_path)
    np.testing.assert_array_equal(again.pull(0, 2, "b")["b"], sgd_state()["b"])


def test_a_full_disk_is_tried_again_unasked(tmp_path: Path, full_disk: set[str]) -> None:
    bench = started(tmp_path)
    train(bench, range(1, 150))
    assert saved(bench) is None
    full_disk.clear()
    bench.now += 61.0
    train(bench, range(150, 151))
    assert saved(bench) == 150


def test_another_trouble_with_a_checkpoint_is_an_error_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = started(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("the folder is gone")

    monkeypatch.setattr(RecoveryCheckpoints, "save", fail)
    train(bench, range(1, 2))
    answer = bench.one(0, Kind.SAVE, 1)
    assert answer.kind is Kind.ERROR
    assert "the folder is gone" in str(answer.body["what"])


def test_a_disk_is_full_also_where_a_library_says_so_in_words() -> None:
    error = CheckpointError("cannot write")
    assert not is_disk_full(error)
    error.__cause__ = RuntimeError("RESOURCE: write: No space left on device [os_error=28]")
    assert is_disk_full(error)


def test_a_damaged_checkpoint_is_the_cause_of_a_state_that_is_missing(tmp_path: Path) -> None:
    bench = started(tmp_path)
    assert saved(bench) == 0
    for file in tmp_path.rglob("*"):
        if file.is_file() and "data" in str(file.parent):
            file.write_bytes(b"x" * file.stat().st_size)
    again = Bench(ServerOptions(server=0, checkpoint_dir=tmp_path))
    welcome = again.one(0, Kind.HELLO, body=hello(0))
    assert "the checkpoint of step 0 is passed over" in str(welcome.body["damage"])
    known = ServerSession(ReplayLog(until_saved=True), has_state=True)
    known.welcome(welcome)
    lost = known.lost_work()
    assert lost is not None
    assert lost.startswith("it came back without a state: the checkpoint of step 0 is passed over")


def test_the_record_of_departures_is_on_disk_before_the_bye_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set(), os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    record = DepartureRecord(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    record.write(Departures(2, {0: "a"}, {1: "b"}))
    assert synced == {path.stat().st_ino for path in (tmp_path, tmp_path / "byes.json")}
    assert record.read() == Departures(2, {0: "a"}, {1: "b"})


def trainer(replay_bytes: int, servers: int = 2) -> tuple[Client, MemoryNetwork]:
    network = MemoryNetwork()
    places = tuple(f"s:{number}" for number in range(1, servers + 1))
    me = TrainerIdentity("job", 0, 1, places, "hash", [])
    lines, timeouts = network.connect(places), Timeouts()
    return Client(
        lines, me, timeouts=timeouts, replay_bytes=replay_bytes, clock=network.clock
    ), network


def push(client: Client, server: int) -> None:
    client.push(server, [Tensor("g", np.zeros(250, np.float32))])


def test_replay_bytes_is_a_total_over_servers() -> None:
    client, network = trainer(4000)
    for _ in range(2):
        client.next_step(1)
        push(client, 0)
        assert not client.replay.is_full
        push(client, 1)
    assert client.replay.bytes == 4000
    assert client.replay.is_full
    client.replay.put_off_saving()
    assert not client.replay.is_full
    network.sleep(11.0)
    assert client.replay.is_full
    for server in (0, 1):
        client.replay.forget_saved(server, 1)
    assert client.replay.bytes == 2000


def test_a_trainer_whose_servers_have_no_room_keeps_so_much_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, _ = trainer(4000, servers=1)
    for _ in range(40):
        client.next_step(1)
        push(client, 0)
    assert client.replay.bytes == 16_000
    assert caplog.text.count("a server that dies now ends the job") == 1


def test_pushes_that_are_applied_are_kept_only_where_servers_are_started_again() -> None:
    kept, applied = ReplayLog(until_saved=True), ReplayLog(until_saved=False)
    for log in (kept, applied):
        for step in (1, 2, 3):
            log.add(Message(Kind.PUSH, "trainer 0", step, tensors=(Tensor("g", np.zeros(2)),)))
        log.applied(2)
    assert [step for step, _ in kept.after(0)] == [1, 2, 3]
    assert [step for step, _ in applied.after(0)] == [3]
