"""A process that asks to join a job, against answers of server 0."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxfleet.errors import ConnectError
from jaxfleet.ps.client.joining import join_job
from jaxfleet.ps.membership import Membership
from jaxfleet.transport.messages import Kind, Message, Plain


@dataclass
class Lines:
    """Connections to a server that gives one answer after the other."""

    answers: list[dict[str, Plain]]
    asked: list[Message] = field(default_factory=list)
    now: float = 0.0

    def send(self, server: int, message: Message) -> None:
        assert server == 0
        self.asked.append(message)

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        if len(self.asked) > len(self.answers):
            self.now += timeout_s
            return None
        number = self.asked[-1].number
        if self.now > number:  # between two requests
            self.now += timeout_s
            return None
        self.now = number + 0.5
        return 0, Message(Kind.OK, "server 0", number=number, body=self.answers[number - 1])

    def renewed(self) -> Collection[int]:
        return ()

    def renew(self, server: int) -> None: ...

    def close(self) -> None: ...


def join(
    lines: Lines, *, digest: Callable[[int], str] = str, connect_s: float = 5.0, **more: Any
) -> Membership | None:
    return join_job(
        lines,
        job="j",
        session="s",
        digest=digest,
        clock=lambda: lines.now,
        connect_s=connect_s,
        **more,
    )


def joined(*answers: dict[str, Plain], begins: bool) -> tuple[Membership | None, int]:
    """Returns the membership, and the number of requests."""
    lines = Lines([*answers])
    return join(lines, begins=begins), len(lines.asked)


def test_a_server_that_has_answered_may_be_silent_for_less_time() -> None:
    lines = Lines([{"trainers": 0}])
    with pytest.raises(ConnectError, match="server 0 does not answer for 3 s"):
        join(lines, connect_s=100.0, silent_s=3.0)
    assert lines.now < 10.0


def test_a_process_that_waits_to_join_ends_with_the_job() -> None:
    lines = Lines([])
    with pytest.raises(ConnectError, match="job 'j' ended before this process could join it"):
        join(lines, connect_s=100.0, has_ended=lambda: lines.now > 20.0)
    assert 20.0 < lines.now < 23.0


MEMBER: dict[str, Plain] = {"epoch": 1, "members": ["a", "s"], "dismissed": []}


def test_a_first_trainer_that_was_started_again_begins_a_job_that_has_not_begun() -> None:
    assert joined({"trainers": 0}, begins=True) == (None, 1)


def test_it_joins_a_job_that_went_on() -> None:
    answers: list[dict[str, Plain]] = [{"trainers": 1}, {"trainers": 1, "waits": True}, MEMBER]
    found, asked = joined(*answers, begins=True)
    assert found == Membership(1, ("a", "s"))
    assert asked == 3
    # Server 0 was started again meanwhile, and does not know the job yet.
    found, asked = joined({"trainers": 1}, {"trainers": 0}, MEMBER, begins=True)
    assert (found, asked) == (Membership(1, ("a", "s")), 3)


def test_it_waits_for_a_server_that_does_not_know_the_trainers_yet() -> None:
    found, asked = joined({"waits": True}, {"waits": True}, {"trainers": 1}, MEMBER, begins=True)
    assert (found, asked) == (Membership(1, ("a", "s")), 4)


def test_any_other_process_waits_for_a_job_that_has_not_begun() -> None:
    found, asked = joined({"trainers": 0}, {"trainers": 0}, MEMBER, begins=False)
    assert (found, asked) == (Membership(1, ("a", "s")), 3)


def test_it_makes_its_programs_again_for_other_servers_than_it_knew() -> None:
    asked: list[tuple[int, tuple[str, ...]]] = []
    servers: list[tuple[str, ...]] = [()]

    def digest(trainers: int) -> str:
        asked.append((trainers, servers[-1]))
        return "abc"

    two: dict[str, Plain] = {"trainers": 1, "servers": ["a:1", "b:1"]}
    one: dict[str, Plain] = {"trainers": 1, "servers": ["a:1"]}
    lines = Lines([two, {"trainers": 1, "waits": True}, one, {**MEMBER, "servers": ["a:1"]}])
    found = join(lines, digest=digest, take_servers=servers.append)
    assert found == Membership(1, ("a", "s"))
    assert asked == [(1, ("a:1", "b:1")), (1, ("a:1",))]
    assert lines.asked[-1].body["servers"] == ["a:1"]
