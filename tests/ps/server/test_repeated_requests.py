"""Repeated requests and lost answers: executed once, answered again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint import PartReceipt, commit
from jaxfleet.ps.server import ServerOptions
from jaxfleet.transport.messages import Kind, Message, Plain
from tests.ps.server.common import SGD, Bench, error_of, hello, sgd_after, sgd_grads, sgd_state


def started(**options: Any) -> Bench:
    return Bench(ServerOptions(**options)).started(SGD, sgd_state())


def pending(
    bench: Bench, *numbers: int, trainer: int = 0, run: bool = True
) -> tuple[Message, list[Message]]:
    """Returns the answer to a `pending`, and the answers that come with it."""
    replies = bench.send(trainer, Kind.PENDING, body={"numbers": list(numbers)}, run=run)
    *others, (_, found) = replies
    assert found.kind is Kind.PENDING
    return found, [message for _, message in others]


def test_a_load_that_comes_again_does_not_undo_what_came_after_it(tmp_path: Path) -> None:
    bench = started()
    body: dict[str, Any] = {"path": str(tmp_path / "saved")}
    receipt = bench.one(0, Kind.SAVE, 0, body).body["receipt"]
    assert isinstance(receipt, dict)
    commit(tmp_path / "saved", [PartReceipt.from_plain(receipt)], step=0)
    first = bench.one(0, Kind.LOAD, 0, body, number=900)
    for trainer in (0, 1):
        bench.push(trainer, 1, sgd_grads(trainer, 1))
    assert bench.core.step == 1
    again = bench.one(0, Kind.LOAD, 0, body, number=900)
    assert (again.kind, again.body) == (first.kind, first.body)
    assert bench.core.step == 1


def test_a_load_does_not_wait_for_a_step_whose_other_gradients_are_lost(tmp_path: Path) -> None:
    bench = started()
    body: dict[str, Any] = {"path": str(tmp_path / "saved")}
    receipt = bench.one(0, Kind.SAVE, 0, body).body["receipt"]
    assert isinstance(receipt, dict)
    commit(tmp_path / "saved", [PartReceipt.from_plain(receipt)], step=0)
    for trainer in (0, 1):
        bench.push(trainer, 1, {"b@GRAD": sgd_grads(trainer, 1)["b@GRAD"]})
    assert bench.one(0, Kind.LOAD, 0, body).kind is Kind.OK
    for trainer in (0, 1):
        bench.push(trainer, 1, sgd_grads(trainer, 1))
    np.testing.assert_array_equal(bench.pull(0, 1, "b")["b"], sgd_after(1)["b"])


def test_a_request_that_comes_again_while_it_is_done_waits_for_the_one_answer() -> None:
    bench = Bench()
    for trainer in (0, 1):
        bench.one(trainer, Kind.HELLO, body=hello(trainer))
    bench.one(0, Kind.DEFINE, body={"program": SGD})
    body: dict[str, Plain] = {"replace": False}
    first = bench.send(0, Kind.ASSIGN, 0, body, sgd_state(), number=50, run=False)
    again = bench.send(0, Kind.ASSIGN, 0, body, sgd_state(), number=50, run=False)
    assert first == again == []
    assert pending(bench, 50, run=False)[0].body["missing"] == []
    assert [message.number for _, message in bench.core.run_tasks()] == [50]
    _, answers = pending(bench, 50)
    assert [(m.kind, m.number) for m in answers] == [(Kind.OK, 50)]


def test_pending_names_the_requests_that_are_not_here() -> None:
    bench = started()
    assert bench.send(0, Kind.PULL, 1, {"names": ["b"]}, number=70) == []
    found, _ = pending(bench, 70, 71)
    assert found.body["missing"] == [71]


@pytest.mark.parametrize("trainer", [0, 1])
def test_pending_reports_whose_pushes_are_lacking(trainer: int) -> None:
    bench = started()
    bench.push(0, 1, sgd_grads(0, 1))
    bench.send(trainer, Kind.PULL, 1, {"names": ["b"]}, number=70)
    found, _ = pending(bench, 70, trainer=trainer)
    assert found.body == {"missing": [], "lacks": trainer == 1, "step": 0}


@pytest.mark.parametrize("trainer", [0, 1])
def test_pending_reports_pushes_that_no_request_of_their_sender_waits_for(trainer: int) -> None:
    bench = started()
    bench.push(0, 1, sgd_grads(0, 1))
    body: dict[str, Plain] = {"numbers": [], "pushed": 1}
    found = bench.one(trainer, Kind.PENDING, 1, body)
    assert found.body == {"missing": [], "lacks": trainer == 1, "step": 0}
    bench.push(1, 1, sgd_grads(1, 1))
    found = bench.one(trainer, Kind.PENDING, 1, body)
    assert found.body == {"missing": [], "lacks": False, "step": 1}


def test_an_error_is_given_again() -> None:
    bench = started()
    first = bench.send(0, Kind.PULL, 1, {"names": ["nothing"]}, number=70)
    assert error_of(first)[0] == "bad_message"
    _, answers = pending(bench, 70)
    assert [error_of(m) for m in answers] == [error_of(first)]


def test_answers_follow_a_trainer_to_its_new_connection() -> None:
    bench = Bench()
    for trainer in (0, 1):
        bench.one(trainer, Kind.HELLO, body=hello(trainer, session=f"s{trainer}"))
    bench.one(0, Kind.DEFINE, body={"program": SGD})
    bench.one(0, Kind.ASSIGN, 0, {"replace": False}, sgd_state())
    assert bench.send(0, Kind.PULL, 1, {"names": ["b"]}, number=70) == []
    bench.one(0, Kind.HELLO, body=hello(0, session="s0"), peer=b"new")
    bench.push(1, 1, sgd_grads(1, 1))
    replies = bench.send(0, Kind.PUSH, 1, arrays=sgd_grads(0, 1), peer=b"new")
    assert [(peer, m.kind, m.number) for peer, m in replies] == [(b"new", Kind.VALUES, 70)]


def test_a_barrier_of_an_earlier_round_opens_no_later_one() -> None:
    bench = started()

    def barrier(trainer: int, number: int) -> list[int]:
        replies = bench.send(trainer, Kind.BARRIER, 1, {"name": "x"}, number=number)
        return [message.number for _, message in replies]

    assert barrier(0, 50) + barrier(1, 51) == [50, 51]
    assert barrier(0, 60) + barrier(1, 61) == [60, 61]
    assert barrier(0, 50) == [50]  # late, and answered as before
    assert barrier(1, 71) == []  # the first trainer has not reached this round


@pytest.mark.parametrize("numbers", [None, "7", list(range(5000))])
def test_a_pending_without_a_short_list_is_refused(numbers: Any) -> None:
    replies = started().send(0, Kind.PENDING, body={"numbers": numbers})
    assert error_of(replies)[0] == "bad_message"


def test_a_process_in_place_of_another_begins_with_numbers_of_its_own() -> None:
    bench = Bench(ServerOptions(lost_after_s=10)).started(SGD, sgd_state())
    bench.send(0, Kind.BARRIER, 1, {"name": "x"}, number=500)
    bench.now += 11
    bench.one(0, Kind.HELLO, body=hello(0, session="next"), peer=b"next")
    bench.one(1, Kind.HELLO, body=hello(1, session="other"), peer=b"other")
    assert bench.send(1, Kind.BARRIER, 1, {"name": "x"}, number=2, peer=b"other") == []
    replies = bench.send(0, Kind.BARRIER, 1, {"name": "x"}, number=2, peer=b"next")
    assert sorted(peer for peer, _ in replies) == [b"next", b"other"]
