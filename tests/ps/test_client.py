"""A trainer's client, on connections that lose messages."""

import itertools
from collections.abc import Collection

import pytest

from jaxfleet.errors import ConnectError, ProgramError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.heartbeat import Pulse
from jaxfleet.ps.client.replay_log import ReplayLog
from jaxfleet.ps.client.server_session import ServerSession
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Kind, Message, Plain

PLACE = "127.0.0.1:6174"


class LosingLines:
    """Connections to a server that lose the first messages; each wait takes a second."""

    def __init__(self, lost: int) -> None:
        self.sent: list[Message] = []
        self.renewals: list[int] = []
        self.rejected = 0
        self._lost = lost
        self._answered = 0

    def send(self, server: int, message: Message) -> None:
        assert server == 0
        self.sent.append(message)

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        assert timeout_s > 0
        if len(self.sent) <= max(self._lost, self._answered):
            return None
        self._answered = len(self.sent)
        asked = self.sent[-1]
        kind = Kind.WELCOME if asked.kind is Kind.HELLO else Kind.OK
        body: dict[str, Plain] = {"incarnation": "one", "step": -1, "defined": False}
        return 0, Message(kind, "server 0", 0, asked.number, body)

    def renewed(self) -> Collection[int]:
        return ()

    def renew(self, server: int) -> None:
        self.renewals.append(server)

    def close(self) -> None:
        """Has nothing to close."""


def client(lines: LosingLines, connect_s: float = 60.0) -> Client:
    me = TrainerIdentity("job", 0, 1, (PLACE,), "hash", [("program p", {})])
    seconds = itertools.count()
    timeouts = Timeouts(connect_s=connect_s)
    return Client(lines, me, timeouts=timeouts, clock=lambda: float(next(seconds)))


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_hello_that_was_lost_is_said_again(lost: int) -> None:
    lines = LosingLines(lost)
    assert client(lines).open() == -1
    hellos = [message for message in lines.sent if message.kind is Kind.HELLO]
    assert len(hellos) == lost + 1
    assert len({hello.number for hello in hellos}) == 1


def test_it_is_not_said_again_for_ever() -> None:
    lines = LosingLines(1000)
    with pytest.raises(ConnectError, match="server 0 at"):
        client(lines).open()
    assert len(lines.sent) < 12


class SlowLines(LosingLines):
    """Connections on which a push takes 2 s to send, and every answer 3 s."""

    now = 0.0

    def send(self, server: int, message: Message) -> None:
        super().send(server, message)
        self.now += 2.0 if message.kind is Kind.PUSH else 0.0

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        self.now += 3.0
        return super().receive(timeout_s)


def test_a_push_reports_how_long_the_exchange_before_it_took() -> None:
    lines = SlowLines(0)
    me = TrainerIdentity("job", 0, 1, (PLACE,), "hash", [])
    asker = Client(lines, me, timeouts=Timeouts(), clock=lambda: lines.now)
    for _ in range(2):
        asker.next_step(1)
        asker.push(0, ())
        asker.wait([asker.request(0, Kind.PULL, body={"names": []})])
        lines.now += 7.0  # the trainer computes
        asker.wait([asker.request(0, Kind.STATS)])  # no part of an exchange
    asker.push(0, ())
    pushes = [message for message in lines.sent if message.kind is Kind.PUSH]
    assert [push.body["took_s"] for push in pushes] == [0.0, 5.0, 5.0]


def test_a_push_that_is_not_applied_is_checked_like_a_request() -> None:
    session = ServerSession(ReplayLog(until_saved=True), pushed=1)
    session.replay.add(Message(Kind.PUSH, "trainer 0", 1))
    assert [session.is_due(now, 3.0) for now in (0.0, 2.9, 3.0)] == [False, False, True]
    session.hear(Pulse(step=1, incarnation=session.greeted))
    assert not session.is_due(20.0, 3.0)


class ShiftedLines(LosingLines):
    """Connections whose server can read nothing, at first or also once they are renewed."""

    def __init__(self, *, is_mended_by_renewal: bool) -> None:
        super().__init__(0)
        self.is_mended_by_renewal = is_mended_by_renewal

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        asked = next((m for m in self.sent if m.kind is Kind.STATS), None)
        if asked is None:
            return super().receive(timeout_s)
        if self.renewals and self.is_mended_by_renewal:
            return 0, Message(Kind.OK, "server 0", 0, asked.number)
        body: dict[str, Plain] = {"error": "bad_message", "what": "the header is not msgpack"}
        return 0, Message(Kind.ERROR, "server 0", body=body)


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_connection_that_carries_nothing_readable_is_renewed_once(*, is_mended: bool) -> None:
    lines = ShiftedLines(is_mended_by_renewal=is_mended)
    asker = client(lines)
    asker.open()
    request = asker.request(0, Kind.STATS)
    if is_mended:
        asker.wait([request])
        assert request.is_done
    else:
        with pytest.raises(ProgramError, match="the header is not msgpack"):
            asker.wait([request])
    assert lines.renewals == [0]
