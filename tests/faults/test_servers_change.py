"""Jobs that go on with more servers, or with fewer, train as with any fixed number: bit for bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.errors import CheckpointError, ConnectError, PeerLostError
from jaxfleet.ps.client.joining import ask_first
from jaxfleet.ps.membership import ServerMove
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.messages import Kind, Message
from tests.faults.changing_jobs import ChangingJob, changes
from tests.faults.cluster import check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_jobs import NAME, End, KilledError, forget_killed, kill
from tests.faults.test_trainers_change import check_close
from tests.tiers import by_default

STEPS = 16
KINDS = ("plain", "clip", "clip_after", "clip_twice", "norm", "keys")


class MovingJob(ChangingJob):
    """A job of two trainers and two servers that is asked to move to others.

    Attributes:
        counts_of_servers: by trainer, how many servers it had at each step.
        answers: what server 0 answered.
    """

    def __init__(self, state_folder: Path, *options: str, kind: str = "norm", **more: Any) -> None:
        words = [f"--kind={kind}", f"--steps={STEPS}", "--pause=0.15", "--step-timeout=30"]
        super().__init__(options=[*words, *options], step_s=30.0, more_servers=1, **more)
        self.state_folder = state_folder
        self.counts_of_servers: dict[int, list[int]] = {}
        self.answers: list[Any] = []
        self.between = self.note

    def note(self, step: Any, state: Any, number: int) -> Any:
        del number
        of_trainer = self.counts_of_servers.setdefault(step.client.me.trainer, [])
        of_trainer.append(len(step.client.me.endpoints))
        return state

    def move(self, servers: int) -> ServerMove:
        return ServerMove(self.places[:servers], str(self.state_folder / f"to-{servers}"))

    def asks(self, servers: int, at_s: float, patience_s: float = 100.0) -> None:
        self.at_s(at_s, partial(self.ask, servers, patience_s))

    def ask(self, servers: int, patience_s: float) -> None:
        """Asks for the first servers until the job has them, as a launch does."""
        until = self.network.clock() + patience_s
        body = {"job": NAME, **self.move(servers).plain()}
        number = 0
        while not self.answers or self.answers[-1].get("moved") is not True:
            if self.network.clock() > until:
                return
            number += 1
            lines = self.network.connect(self.places[:1])
            answer = ask_first(
                lines, Kind.MOVE, body, number=number, clock=self.network.clock, within_s=1.0
            )
            lines.close()
            if answer is not None:
                self.answers.append(answer)
            self.network.sleep(0.3)
        self.answers.append({})


@pytest.mark.parametrize("kind", by_default(KINDS, "norm"))
def test_two_then_three_then_one_server_are_as_two(
    kind: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = MovingJob(tmp_path, kind=kind)
    job.asks(3, at_s=0.4)
    job.asks(1, at_s=1.4)
    job.run()
    assert [changes(counts) for counts in job.counts_of_servers.values()] == [[2, 3, 1]] * 2
    assert job.starts == [1, 1, 1]
    check_same(job.survivors(), undisturbed(kind, STEPS))


@pytest.mark.grid
def test_rows_of_a_table_move_with_their_buckets(tmp_path: Path) -> None:
    unmoved = ChangingJob(options=["--kind=table", f"--steps={STEPS}"], step_s=30.0)
    unmoved.run()
    job = MovingJob(tmp_path, kind="table")
    job.asks(3, at_s=0.4)
    job.asks(1, at_s=1.4)
    job.run()
    assert changes(job.counts_of_servers[0]) == [2, 3, 1]
    assert "rows" in job.survivors()[0]
    check_same(job.survivors(), unmoved.survivors()[0])


@pytest.mark.grid
@pytest.mark.parametrize("second_at_s", [0.2, 1.8])
def test_processes_that_wait_to_join_a_job_become_members_although_it_moves(
    second_at_s: float, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The first one waits until there are two, which can have an equal part of the batch."""
    job = MovingJob(tmp_path, joins_at_s=(0.2, second_at_s), kind="plain")
    job.asks(3, at_s=0.4)
    job.run()
    assert changes(job.counts_of_servers[0]) == [2, 3]
    assert (job.counts()[0], job.counts()[-1]) == (2, 4)
    check_close(job, undisturbed, trainers=4, steps=STEPS)


@pytest.mark.grid
@pytest.mark.parametrize("lost", ["killed", "leaves"])
def test_a_job_that_loses_a_trainer_before_it_moves_goes_on_and_moves(
    lost: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = MovingJob(tmp_path, "--on-lost=continue", kind="plain")
    job.asks(3, at_s=0.4)

    def look(trainer: int, _server: int, message: Message) -> None:
        is_saving = str(message.body.get("key", "")).startswith(f"save {tmp_path}")
        if trainer == 1 and is_saving and lost == "killed":
            kill()

    def between(step: TrainerStep, state: Any, number: int) -> Any:
        me = step.client.me
        if lost == "leaves" and me.membership.move is not None and me.trainer == 1:
            step.leave()
        return job.note(step, state, number)

    job.on_send, job.between = look, between
    job.run()
    job.ends = {name: end for name, end in job.ends.items() if not was_killed(end)}
    assert changes(job.counts_of_servers[0]) == [2, 3]
    assert changes(job.counts()) == [2, 1]
    check_close(job, undisturbed, trainers=1, steps=STEPS)


@pytest.mark.grid
def test_a_request_that_server_0_has_lost_with_its_life_is_repeated(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = MovingJob(tmp_path, folder=tmp_path / "checkpoints", returns_s=20.0)
    job.asks(3, at_s=0.4)
    is_killed = False

    def look(_trainer: int, _server: int, message: Message) -> None:
        nonlocal is_killed
        if not is_killed and job.answers and message.kind is Kind.PUSH:
            is_killed = True
            job.kill_server(0, away_s=0.5)

    job.on_send = look
    job.run()
    assert is_killed
    assert {"waits": True} in job.answers
    assert job.starts == [2, 1, 1]
    assert changes(job.counts_of_servers[0]) == [2, 3]
    check_same(job.survivors(), undisturbed("norm", STEPS))


def was_killed(end: End) -> bool:
    return isinstance(end.error, KilledError)


def test_a_state_that_cannot_be_saved_stays_with_its_servers(
    tmp_path: Path, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "to-3").touch()  # no folder
    job = MovingJob(tmp_path, kind="plain")
    job.asks(3, at_s=0.4, patience_s=2.0)
    job.run()
    del job.ends["server 2"]
    assert changes(job.counts_of_servers[0]) == [2]
    assert "does not move to other servers for 100 steps" in caplog.text
    check_same(job.survivors(), undisturbed("plain", STEPS))


def kill_at_message(job: MovingJob, process: int, number: int) -> None:
    """Kills a trainer before its nth message of the move, its first bye the first."""
    sent = 0

    def look(trainer: int, _server: int, message: Message) -> None:
        nonlocal sent
        if trainer == process and (sent or message.body.get("moves")):
            sent += 1
            if sent == number:
                kill()

    job.on_send = look


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("process", [0, 1])
def test_a_trainer_killed_in_the_middle_of_a_move_ends_a_job_that_needs_it(
    process: int, number: int, tmp_path: Path
) -> None:
    job = MovingJob(tmp_path, "--on-lost=fail")
    job.asks(3, at_s=0.4, patience_s=5.0)
    kill_at_message(job, process, number)
    job.run()
    assert isinstance(job.ends[f"trainer {process}"].error, KilledError)
    text = job.error(f"trainer {1 - process}", PeerLostError)
    assert f"trainer {process}" in text
    assert job.ends[f"trainer {1 - process}"].at_s < 120.0


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(1, 13))
@pytest.mark.parametrize("process", [0, 1])
def test_a_job_that_loses_a_trainer_in_the_middle_of_a_move_goes_on_at_the_other_servers(
    process: int, number: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = MovingJob(tmp_path, "--on-lost=continue", kind="plain")
    job.asks(3, at_s=0.4, patience_s=5.0)
    kill_at_message(job, process, number)
    job.run()
    assert forget_killed(job) == 1
    assert changes(job.counts_of_servers[0])[-1] == 3
    check_close(job, undisturbed, trainers=1, steps=STEPS)


OF_A_MOVE = [("save", 0), ("save", 1)]
OF_A_MOVE += [(kind, server) for kind in ("bye", "hello", "load") for server in range(3)]


@pytest.mark.parametrize("lost", by_default(OF_A_MOVE, ("bye", 1), ("load", 2)))
def test_a_server_killed_in_the_middle_of_a_move_ends_the_job_with_an_error(
    lost: tuple[str, int], tmp_path: Path
) -> None:
    (kind, server), job = lost, MovingJob(tmp_path)
    job.asks(3, at_s=0.4, patience_s=5.0)
    is_killed = False

    def look(trainer: int, _server: int, message: Message) -> None:
        nonlocal is_killed
        moves = message.kind is not Kind.HELLO or message.body.get("epoch") == 2
        if not is_killed and trainer == 0 and message.kind.value == kind and moves:
            is_killed = True
            job.kill_server(server)

    job.on_send = look
    job.run()
    assert is_killed
    for trainer in range(2):
        error = job.ends[f"trainer {trainer}"].error
        assert isinstance(error, PeerLostError | ConnectError | CheckpointError)
        # Trainer 0 alone asks servers for parts of checkpoints; the others learn that it failed.
        assert f"server {server}" in str(error) or f"trainer 0 could not {kind}" in str(error)
        assert job.ends[f"trainer {trainer}"].at_s < 120.0
