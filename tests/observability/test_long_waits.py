"""A wait of more than 15 s is logged once, with its purpose and both peers."""

import logging
from typing import Any

import pytest

from jaxfleet.cluster.group_view import GroupView
from jaxfleet.cluster.rendezvous.protocol import Poll
from jaxfleet.errors import PeerLostError
from jaxfleet.observability import LongWait, notices
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server import ServerOptions
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind, Message
from tests.ps.server.common import SGD, Bench, sgd_grads, sgd_state


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_logged_once_and_not_before_15_s() -> None:
    clock, said = Clock(), list[str]()
    wait = LongWait(clock, say=said.append)
    for clock.now in (0.0, 14.9, 15.1, 20.0, 100.0):
        wait.look(lambda: f"waits at {clock.now:g}")
    assert said == ["waits at 15.1 (for 15 s now)"]


def test_a_trainer_logs_which_server_it_waits_for_and_for_what(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = MemoryNetwork()
    me = TrainerIdentity("job", 0, 1, ("s:1",), "hash", [("program p", {})])
    client = Client(network.connect(["s:1"]), me, timeouts=Timeouts(), clock=network.clock)
    with pytest.raises(PeerLostError):
        client.wait([client.request(0, Kind.BARRIER, body={"name": "here"})], timeout_s=60.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "trainer 0 waits at step 0 for barrier 'here' from server 0 at s:1" in text
    assert "; trainer 0 gives up after 60 s (for 15 s now)" in text


def test_a_server_logs_which_trainer_is_missing_once_for_all_that_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(ServerOptions(lost_after_s=600)).started(SGD, sgd_state())
    bench.push(0, 1, sgd_grads(0, 1))
    for name in ("b", "w.block0"):
        bench.send(0, Kind.PULL, 1, {"names": [name]})
    bench.wait(14.0)
    assert not caplog.records
    bench.wait(60.0)
    (record,) = caplog.records
    text = record.getMessage()
    assert "server 0: trainer 0 waits for trainer 1:" in text
    assert "b@GRAD" in text
    assert "of step 1" in text


def test_a_meeting_logs_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "LOGGED_AFTER_S", 0.0)
    poll = Poll(1.0)
    for _ in range(3):
        poll.pause(lambda: "trainer 0 waits for trainer 1")
    assert [r.getMessage() for r in caplog.records] == [
        "jaxfleet: trainer 0 waits for trainer 1 (for 0 s now)"
    ]


def test_a_rank_names_the_ranks_that_are_elsewhere() -> None:
    news = GroupView()
    ranks: list[Any] = [
        {"rank": 0, "step": 3, "doing": "running"},
        {"rank": 1, "step": 3, "doing": "running"},
        {"rank": 2, "step": 2, "doing": "compiling"},
    ]
    news.hear(Message(Kind.HEARTBEAT, "rank 0", body={"ranks": ranks}))
    assert news.elsewhere(0, 3, "running") == "rank 2: step 2, compiling"
    assert not news.elsewhere(2, 3, "running")
