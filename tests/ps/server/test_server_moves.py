"""What a server answers when a job is to move to other servers, and to trainers that do."""

from pathlib import Path
from typing import Any

import pytest

from jaxfleet.ps.membership import Membership, ServerMove
from jaxfleet.ps.server import ServerCore, ServerOptions
from jaxfleet.transport.messages import Kind, Message, Plain
from tests.ps.server.common import (
    CACHE,
    ENDPOINT,
    SGD,
    Bench,
    error_of,
    hello,
    sgd_grads,
    sgd_state,
)

OPTIONS = ServerOptions(server=0, lost_after_s=5, step_timeout_s=600)
MOVE = ServerMove((ENDPOINT, "127.0.0.1:2"), "/job/moving")


def started(options: ServerOptions = OPTIONS, **facts: Any) -> Bench:
    bench = Bench(options).started(SGD, sgd_state())
    for trainer in range(2):
        bench.one(
            trainer, Kind.HELLO, body=hello(trainer, session=f"s{trainer}", fixed="", **facts)
        )
    return bench


def ask(bench: Bench, move: ServerMove = MOVE, **more: Plain) -> Message:
    return bench.one(9, Kind.MOVE, body={"job": "j", **move.plain(), **more})


def step(bench: Bench, number: int) -> list[tuple[bytes, Message]]:
    """Sends the gradients of a step; returns all answers."""
    return [
        reply
        for trainer in range(2)
        for reply in bench.send(
            trainer, Kind.PUSH, number, {"rows": 12}, sgd_grads(trainer, number)
        )
    ]


def newest(bench: Bench) -> Membership:
    found = Membership.of(bench.one(0, Kind.HEARTBEAT, body={"session": "s0"}).body)
    return found or Membership()


def greet(bench: Bench, members: Membership) -> list[tuple[bytes, Message]]:
    return [
        reply
        for trainer, session in enumerate(members.sessions)
        for reply in bench.send(
            trainer,
            Kind.HELLO,
            body={**hello(trainer, session=session, fixed=""), **members.plain()},
            peer=b"%d in epoch %d" % (trainer, members.epoch),
        )
    ]


def say_bye(bench: Bench, trainer: int) -> list[tuple[bytes, Message]]:
    peer = b"%d in epoch 1" % trainer
    return bench.send(trainer, Kind.BYE, body={"moves": True}, peer=peer)


def moving(**facts: Any) -> Bench:
    """Returns a server in the epoch after whose next step the job moves."""
    bench = started(**facts)
    step(bench, 1)
    assert ask(bench).body == {"moved": False}
    bench.send(0, Kind.PUSH, 2, {"rows": 12}, sgd_grads(0, 2))
    members = newest(bench)
    assert members == Membership(1, ("s0", "s1"), (), MOVE)
    assert [message.kind for _, message in greet(bench, members)] == [Kind.WELCOME] * 2
    return bench


def test_a_move_is_decided_at_the_first_gradients_of_a_step() -> None:
    bench = moving()
    assert ask(bench).body == {"moved": False}  # a launch asks again and again
    assert newest(bench).epoch == 1


def test_a_process_joins_the_servers_to_which_a_job_moves_and_not_those_that_it_leaves() -> None:
    bench = moving()
    program = bench.core.trainers.facts["program"]
    body: dict[str, Plain] = {"job": "j", "session": "new", "trainers": 2, "program": program}
    assert bench.one(8, Kind.JOIN, body=body).body == {"trainers": 2, "waits": True}
    for trainer in range(2):
        peer = b"%d in epoch 1" % trainer
        bench.send(trainer, Kind.PUSH, 2, {"rows": 12}, sgd_grads(trainer, 2), peer=peer)
    assert newest(bench) == Membership(1, ("s0", "s1"), (), MOVE)


def test_to_peek_changes_nothing() -> None:
    bench = started()
    assert ask(bench, peek=True).body == {"moved": False}
    step(bench, 1)
    assert newest(bench) == Membership()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"moves_to": [ENDPOINT, ENDPOINT]}, "a move names endpoints, each once, and a folder"),
        ({"moves_to": []}, "a move names endpoints, each once, and a folder"),
        ({"moves_to": [ENDPOINT, 2]}, "a move names endpoints, each once, and a folder"),
        ({"moves_through": ""}, "a move names endpoints, each once, and a folder"),
        (
            {"moves_to": ["127.0.0.1:2", ENDPOINT]},
            f"a job with the servers {ENDPOINT} cannot move to 127.0.0.1:2, {ENDPOINT}",
        ),
        ({"job": "k"}, "this server is of job 'j', not 'k'"),
    ],
)
def test_a_move_that_cannot_be_is_refused(body: dict[str, Plain], what: str) -> None:
    asked = {"job": "j", **MOVE.plain(), **body}
    assert error_of(started().one(9, Kind.MOVE, body=asked))[1] == what


def test_a_job_whose_trainers_are_fixed_keeps_its_servers() -> None:
    bench = Bench(OPTIONS).started(SGD, sgd_state())
    code, text = error_of(ask(bench))
    assert code == "refused"
    assert text.startswith("no server can be added or removed: the trainers are fixed: ")


def test_another_move_waits_for_the_first() -> None:
    other = ServerMove((ENDPOINT, "127.0.0.1:3"), "/job/moving")
    for bench in moving(), started():
        ask(bench)
        code, text = error_of(ask(bench, other))
        assert (code, text) == ("refused", "the job is about to move to other servers already")


def test_byes_are_answered_together_and_the_process_begins_anew() -> None:
    bench = moving()
    assert say_bye(bench, 0) == []
    assert not bench.core.finished
    assert [message.kind for _, message in say_bye(bench, 1)] == [Kind.OK] * 2
    assert bench.core.finished
    members = bench.core.next_members
    assert members == Membership(2, ("s0", "s1"))
    bench.core = ServerCore(ENDPOINT, CACHE, lambda: bench.now, OPTIONS)
    bench.core.expect(members)
    asked = bench.one(9, Kind.JOIN, body={"job": "j", "session": "s", "trainers": 0})
    assert asked.body == {"waits": True}  # a job that has begun
    assert error_of(greet(bench, Membership(1, ("s0", "s1"))))[0] == "rescaled"
    assert [message.kind for _, message in greet(bench, members)] == [Kind.WELCOME] * 2


def test_a_server_that_does_not_stay_ends() -> None:
    bench = moving()
    bench.core._sessions.server = 2  # noqa: SLF001
    for trainer in range(2):
        say_bye(bench, trainer)
    assert bench.core.finished
    assert bench.core.next_members is None
    assert bench.core.failure is None


def test_a_trainer_lost_at_its_bye_is_named_to_the_others() -> None:
    bench = moving(goes_on=False)
    say_bye(bench, 0)
    told = bench.wait(20.0)
    text = "trainer 1 did not move with the job to other servers"
    assert ("peer_lost", text) in [error_of([reply]) for reply in told]
    assert bench.core.next_members is None


def test_a_job_that_goes_on_moves_without_a_trainer_that_is_lost_at_its_bye() -> None:
    bench = moving(goes_on=True)
    say_bye(bench, 0)
    assert [message.kind for _, message in bench.wait(20.0)] == [Kind.OK]
    assert bench.core.next_members is not None


def test_a_server_that_is_added_takes_the_number_of_trainers_from_the_job() -> None:
    options = ServerOptions(server=0, job="j", trainers=7)
    bench = Bench(options)
    members = Membership(3, ("s0", "s1"))
    assert [message.kind for _, message in greet(bench, members)] == [Kind.WELCOME] * 2
    assert bench.core.trainers.count == 2


def test_the_state_that_moves_may_be_saved_beside_the_servers_own_checkpoints(
    tmp_path: Path,
) -> None:
    options = ServerOptions(server=0, save_dirs=(tmp_path / "of user",), checkpoint_dir=tmp_path)
    bench = Bench(options).started(SGD, sgd_state())
    for trainer in range(2):
        bench.one(trainer, Kind.HELLO, body=hello(trainer, fixed=""))
    for folder, kind in ("moving/epoch-1", Kind.OK), ("server0", Kind.ERROR), ("x", Kind.ERROR):
        answer = bench.one(0, Kind.SAVE, body={"path": str(tmp_path / folder)})
        assert answer.kind is kind, answer
        assert ask(bench, ServerMove(MOVE.servers, str(tmp_path / folder))).kind is kind


def test_a_server_that_has_all_byes_answers_no_hello_of_the_next_epoch() -> None:
    """Its last checkpoint may still be written; the next life answers."""
    bench = moving()
    for trainer in range(2):
        say_bye(bench, trainer)
    assert greet(bench, Membership(2, ("s0", "s1"))) == []
    assert bench.core.finished
    assert bench.core.next_members == Membership(2, ("s0", "s1"))


def test_a_trainer_that_has_moved_ends_what_a_server_was_without_the_byes_of_others() -> None:
    """They have said them before the server was started again, or take it for lost."""
    bench = moving()
    assert say_bye(bench, 1) == []
    members = Membership(2, ("s0", "s1"))
    body = {**hello(0, session="s0", fixed=""), **members.plain(), "has_moved": True}
    told = bench.send(0, Kind.HELLO, body=body, peer=b"0 in epoch 2")
    assert [(peer, message.kind) for peer, message in told] == [(b"1 in epoch 1", Kind.OK)]
    assert bench.core.finished
    assert bench.core.next_members == members


def test_a_server_whose_job_does_not_move_ends_for_nobody_that_has_moved() -> None:
    bench = started()
    members = Membership(1, ("s0", "s1"))
    body = {**hello(0, session="s0", fixed=""), **members.plain(), "has_moved": True}
    assert bench.send(0, Kind.HELLO, body=body, peer=b"0 in epoch 1") == []
    assert not bench.core.finished


def test_a_request_that_is_not_repeated_lapses() -> None:
    bench = started()
    step(bench, 1)
    assert ask(bench).body == {"moved": False}
    bench.wait(6.0)
    bench.send(0, Kind.PUSH, 2, {"rows": 12}, sgd_grads(0, 2))
    assert newest(bench) == Membership()


def test_a_bye_of_a_trainer_that_connects_again_counts() -> None:
    bench = moving()
    say_bye(bench, 0)
    body = {**hello(0, session="s0", fixed=""), **Membership(1, ("s0", "s1"), (), MOVE).plain()}
    assert bench.one(0, Kind.HELLO, body=body, peer=b"again").kind is Kind.WELCOME
    assert [(peer, message.kind) for peer, message in say_bye(bench, 1)] == [
        (b"again", Kind.OK),
        (b"1 in epoch 1", Kind.OK),
    ]


def test_a_bye_that_moves_from_a_job_that_does_not_is_refused() -> None:
    answer = started().one(0, Kind.BYE, body={"moves": True})
    assert error_of(answer)[1] == "the job does not move to other servers"


def test_a_hello_that_is_refused_leaves_no_epoch_behind() -> None:
    bench = Bench(ServerOptions(server=0, job="j", trainers=2))
    stranger = {**hello(0, session="x", job="k"), **Membership(3, ("x",)).plain()}
    assert bench.one(0, Kind.HELLO, body=stranger).kind is Kind.ERROR
    assert bench.core.trainers.count == 2
    assert bench.one(0, Kind.HELLO, body=hello(0)).kind is Kind.WELCOME
