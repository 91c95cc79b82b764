"""What server 0 answers to a process that may join, or asks whether others may."""

from dataclasses import replace
from typing import Any

import pytest

from jaxfleet.ps.membership import Membership
from jaxfleet.ps.server import ServerOptions
from jaxfleet.transport.messages import Kind, Message
from tests.ps.server.common import ENDPOINT, SGD, Bench, error_of, hello, sgd_grads, sgd_state

OPTIONS = ServerOptions(server=0, lost_after_s=5, step_timeout_s=600)


def started(**facts: Any) -> Bench:
    bench = Bench(OPTIONS).started(SGD, sgd_state())
    for trainer in range(2):
        body = hello(trainer, session=f"s{trainer}", **{"fixed": "", "leaves": True, **facts})
        assert bench.one(trainer, Kind.HELLO, body=body).kind is Kind.WELCOME
    return bench


def ask(bench: Bench) -> Any:
    body = {"job": "j", "session": "one that asks", "trainers": 0}
    return bench.one(9, Kind.JOIN, body=body)


def test_the_trainers_their_rows_and_whether_they_leave_are_answered() -> None:
    bench = started()
    said = {"trainers": 2, "servers": [ENDPOINT], "rows": 0, "leaves": True, "goes_on": False}
    assert ask(bench).body == said
    bench.send(0, Kind.PUSH, 1, {"rows": 12}, sgd_grads(0, 1))
    assert ask(bench).body["rows"] == 12
    assert ask(started(leaves=False)).body["leaves"] is False


def test_a_process_started_in_the_place_of_one_that_leaves_may_not() -> None:
    bench = started()
    body = hello(1, session="s2", fixed="", leaves=False, life=1)
    bench.wait(6.0)
    bench.send(0, Kind.HEARTBEAT, body={"doing": "waiting", "session": "s0"})
    bench.one(1, Kind.HELLO, body=body, peer=b"another connection")
    assert ask(bench).body["leaves"] is False


def test_processes_that_are_members_no_more_are_forgotten() -> None:
    bench = started()
    body = hello(1, session="s2", fixed="", leaves=True, life=1)
    bench.wait(6.0)
    bench.send(0, Kind.HEARTBEAT, body={"doing": "waiting", "session": "s0"})
    assert bench.one(1, Kind.HELLO, body=body, peer=b"another").kind is Kind.WELCOME
    assert ask(bench).body["leaves"] is True
    assert bench.core._members.willing == {"s0", "s2"}  # noqa: SLF001


@pytest.mark.parametrize("fixed", ["with batch='local' it would change", None])
def test_a_job_whose_trainers_are_fixed_refuses_with_the_reason(fixed: str | None) -> None:
    code, text = error_of(ask(started(fixed=fixed)))
    assert code == "refused"
    assert text == f"no trainer can join: {fixed or 'its trainers are of another version'}"


def test_a_job_that_has_not_begun_says_so() -> None:
    assert ask(Bench(OPTIONS)).body == {"trainers": 0}


def test_a_restarted_server_whose_trainers_have_not_come_yet_lets_wait() -> None:
    """It must not pass for a job that has not begun, which the process would begin anew."""
    bench = started()
    bench.core.trainers.facts.clear()
    assert ask(bench).body == {"waits": True}


def test_nobody_waits_to_join_a_job_whose_trainers_are_all_lost() -> None:
    bench = started()
    bench.wait(4.0)
    bench.send(1, Kind.HEARTBEAT, body={"doing": "waiting", "session": "s1"})
    bench.wait(4.0)
    assert ask(bench).body["trainers"] == 2  # one lives
    bench.wait(4.0)
    code, text = error_of(ask(bench))
    assert code == "refused"
    assert text == "all trainers of the job are lost, and its state with them"


def test_who_joins_waits_for_members_that_have_not_greeted_a_server_since_it_was_started() -> None:
    bench = started()
    members = bench.core._members  # noqa: SLF001
    members.following = Membership(1, ("one that came to no other",))
    assert ask(bench).body == {"waits": True}


def test_the_time_while_a_server_was_suspended_counts_for_no_candidate_and_no_change() -> None:
    bench = started()
    body = {"job": "j", "session": "new", "trainers": 2, "program": "hash"}
    bench.core.trainers.facts["program"] = "hash"
    assert bench.one(9, Kind.JOIN, body=body).body == {"trainers": 2, "waits": True}
    members, changes = bench.core._members, bench.core._changes  # noqa: SLF001
    changes._end._lacks_since = changes._since = bench.now  # noqa: SLF001
    bench.now += 60.0
    bench.core.forgive(60.0)
    assert not members.is_lost("new", bench.now)
    assert changes._end._lacks_since == changes._since == bench.now  # noqa: SLF001


def test_a_former_number_counts_only_in_the_epoch_of_the_servers_checkpoint() -> None:
    bench = started()
    end = bench.core._changes._end  # noqa: SLF001
    end.restored = 3
    said = Message(Kind.HELLO, "trainer 0", body={"former": 1, "former_epoch": 3})
    assert end.former(said) == 1
    assert end.former(replace(said, body={"former": 1, "former_epoch": 4})) is None
    assert end.former(replace(said, body={"former": 2, "former_epoch": 3})) is None


def test_a_trainer_that_leaves_while_it_waits_for_values_is_told_that_it_has_left() -> None:
    bench = started()
    assert not bench.send(1, Kind.LEAVE)  # answered when the others have come to their places
    bench.wait(3.0)
    answer = bench.one(1, Kind.PULL, 1, {"names": []})
    assert answer.body["error"] == "rescaled"
    assert (answer.body["members"], answer.body["dismissed"]) == (["s0"], ["s1"])
