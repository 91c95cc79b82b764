"""Messages of rank 0 to the other ranks."""

import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxfleet.cluster.coordinator import RUNNING, Coordinator
from jaxfleet.cluster.coordinator_client import CoordinatorClient
from jaxfleet.cluster.group_view import Termination
from jaxfleet.cluster.process_group import first_difference
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind, Message, Tensor


class Ranks:
    """Ranks controlled by a test."""

    def __init__(self, size: int) -> None:
        self.center = Coordinator(size, "job", "host:1", lost_after_s=2.0)
        self.told: list[tuple[bytes, Message]] = []
        for rank in range(size):
            self.say(rank, Kind.HELLO, job="job", size=size)

    def say(self, rank: int, kind: Kind, *, step: int = 0, number: int = 0, **body: Any) -> None:
        doing = body.get("what", "")
        said = {"rank": rank, "session": f"process {rank}", "doing": doing, **body}
        payload = (Tensor("payload", np.frombuffer(f"{rank}".encode(), np.uint8)),)
        tensors = payload if kind is Kind.BARRIER else ()
        line = f"line of {rank}".encode()
        message = Message(kind, "", step=step, number=number, body=said, tensors=tensors)
        self.told = self.center.take(line, message)

    def beat(self, rank: int, step: int, doing: str = RUNNING, runs: str = "train") -> None:
        self.say(rank, Kind.HEARTBEAT, step=step, doing=doing, runs=runs)

    def verdict(self) -> Termination:
        """Returns the latest verdict sent to all ranks."""
        found = {Termination.of(message.body.get("verdict")) for _, message in self.told}
        found.discard(None)
        assert len(found) == 1, self.told
        lines = {line for line, message in self.told if message.body.get("verdict")}
        assert len(lines) == self.center.size
        return found.pop() or Termination(-1, "")


def test_all_are_welcome_when_the_last_has_come() -> None:
    ranks = Ranks(3)
    assert [message.body["came"] for _, message in ranks.told] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"rank": 1, "session": "another"}, "another process is rank 1 already"),
        ({"rank": 2, "session": "x"}, "there is no rank 2 among 2"),
        ({"rank": 1, "session": "x", "job": "other"}, "2 ranks of job 'job', not rank 1 of 2 of"),
    ],
)
def test_who_does_not_belong_is_refused(body: dict[str, Any], says: str) -> None:
    ranks = Ranks(2)
    given = {"job": "job", "size": 2, **body}
    ranks.say(given.pop("rank"), Kind.HELLO, **given)
    ((_, answer),) = ranks.told
    assert says in str(answer.body["refused"])


def test_what_all_ask_for_is_answered_in_the_order_of_ranks() -> None:
    ranks = Ranks(2)
    ranks.say(1, Kind.BARRIER, number=1, what="here")
    assert not ranks.told
    ranks.say(0, Kind.BARRIER, number=1, what="here")
    for _, answer in ranks.told:
        assert [tensor.array.tobytes() for tensor in answer.tensors] == [b"0", b"1"]


def test_an_answer_that_was_lost_is_given_again() -> None:
    ranks = Ranks(2)
    for rank in (1, 0):
        ranks.say(rank, Kind.BARRIER, number=1, what="here")
    wanted = ranks.told[0][1]
    ranks.say(0, Kind.BARRIER, number=2, what="there")  # it has its answer, and continues
    ranks.say(1, Kind.BARRIER, number=1, what="here")
    assert ranks.told == [(b"line of 1", wanted)]


def test_an_answer_is_kept_until_all_have_had_it() -> None:
    ranks = Ranks(2)
    for rank in (1, 0):
        ranks.say(rank, Kind.BARRIER, number=1, what="here")
    ranks.say(0, Kind.HEARTBEAT, had=1)
    assert ranks.center.kept_bytes == 2
    ranks.say(1, Kind.HEARTBEAT, had=1)
    assert ranks.center.kept_bytes == 0
    ranks.say(1, Kind.BARRIER, number=1, what="here")  # sent again before the answer arrived
    assert ranks.told == []
    assert ranks.center.kept_bytes == 0


def test_what_was_lost_on_the_way_is_asked_for() -> None:
    ranks = Ranks(2)
    ranks.say(1, Kind.BARRIER, number=1, what="here", again=True)
    ((line, asked),) = ranks.told
    assert (line, asked.kind, asked.number) == (b"line of 1", Kind.PENDING, 1)
    ranks.say(1, Kind.BARRIER, number=1, what="here")
    ranks.say(1, Kind.BARRIER, number=1, what="here", again=True)
    assert ranks.told == []


def test_a_broken_group_keeps_nothing() -> None:
    ranks = Ranks(2)
    ranks.say(1, Kind.BARRIER, number=1, what="here")
    ranks.say(0, Kind.BARRIER, number=1, what="there")
    assert ranks.center.kept_bytes == 0


@pytest.mark.parametrize("lost", [None, "request", "answer"])
def test_what_is_gathered_travels_once_however_long_the_last_one_takes(lost: str | None) -> None:
    job = Gathering(lost)
    found = job.run()
    payloads = [bytes([rank]) * SIZE for rank in range(3)]
    assert found == {f"rank {rank}": [payloads, [b"done"] * 3] for rank in range(3)}
    assert job.center.kept_bytes <= 3 * len(b"done")
    assert job.brought == (SIZE * (4 if lost == "request" else 3))
    assert job.given == 3 * SIZE * (4 if lost == "answer" else 3)


SIZE = 100_000


class Gathering:
    """Three ranks in memory at a gather; the last arrives after 100 s.

    Attributes:
        brought: bytes of the first payload, sent by ranks.
        given: bytes sent by rank 0.
    """

    def __init__(self, lost: str | None) -> None:
        self.lost, self.brought, self.given = lost, 0, 0
        self.center = Coordinator(3, "job", "host:1", lost_after_s=1e6)
        self.network = MemoryNetwork(faults=self._carried)
        self._ended = 0

    def run(self) -> dict[str, Any]:
        people: dict[str, Any] = {"center": self._center}
        people |= {f"rank {rank}": partial(self._rank, rank) for rank in range(3)}
        found = self.network.run(people)
        return {name: value for name, value in found.items() if name != "center"}

    def _carried(self, _: str, message: Message) -> int:
        size = sum(tensor.array.nbytes for tensor in message.tensors)
        if size < SIZE:
            return 1
        is_request = message.kind is Kind.BARRIER
        self.brought += size if is_request else 0
        self.given += 0 if is_request else size
        if self.lost != ("request" if is_request else "answer"):
            return 1
        self.lost = None
        return 0

    def _center(self) -> None:
        listener = self.network.listen("127.0.0.1:7")
        while self._ended < 3:
            if (found := listener.receive(1.0)) is not None:
                for line, message in self.center.take(*found):
                    listener.send(line, message)

    def _rank(self, rank: int) -> list[list[bytes]]:
        member = CoordinatorClient(
            self.network,
            "127.0.0.1:7",
            rank=rank,
            size=3,
            job="job",
            lost_after_s=1e6,
            clock=self.network.clock,
            beats=False,
        )
        member.meet(50.0)
        self.network.sleep(100.0 if rank == 2 else 0.0)
        first = member.together("first", bytes([rank]) * SIZE, 300.0)
        found = [first, member.together("second", b"done", 300.0)]
        self._ended += 1
        return found


def test_who_is_silent_is_lost_and_named_to_all() -> None:
    ranks = Ranks(2)
    ranks.beat(1, 7)
    ranks.told = ranks.center.passed(1.5)
    assert not ranks.told
    ranks.beat(0, 7)
    ranks.told = ranks.center.passed(1.0)
    silent = "rank 1 is lost: silent for 2.5 s; its last report: step 7, running"
    assert ranks.verdict() == Termination(1, silent)


def test_who_left_is_missed_by_the_next_step_only() -> None:
    ranks = Ranks(2)
    ranks.beat(0, 3)
    ranks.say(1, Kind.BYE, step=3)
    assert ranks.center.verdict is None
    ranks.beat(0, 4)
    assert "rank 1 left after step 3, and rank 0 waits" in ranks.verdict().what


def test_who_left_is_missed_where_others_ask() -> None:
    ranks = Ranks(2)
    ranks.say(1, Kind.BYE, step=3)
    ranks.say(0, Kind.BARRIER, step=3, number=1, what="saving")
    assert "rank 1 left after step 3, and rank 0 waits for it: step 3, saving" in (
        ranks.verdict().what
    )


def test_all_may_go_when_all_have_said_bye() -> None:
    ranks = Ranks(2)
    for _ in range(2):  # a repeated report counts once
        ranks.say(1, Kind.BYE, step=3, number=9)
        assert not ranks.told
    ranks.say(0, Kind.BYE, step=3, number=4)
    assert [(line, message.number) for line, message in ranks.told] == [
        (b"line of 1", 9),
        (b"line of 0", 4),
    ]


def test_a_broken_group_does_not_end_well() -> None:
    ranks = Ranks(2)
    ranks.say(1, Kind.BYE, step=3, number=9)
    ranks.beat(0, 4)
    ranks.say(0, Kind.BYE, step=4, number=4, error="PeerLostError: rank 1 left")
    assert all(message.kind is not Kind.OK for _, message in ranks.told)


def test_an_error_of_one_is_told_to_all() -> None:
    ranks = Ranks(3)
    ranks.say(2, Kind.BYE, step=5, error="ValueError: no rows")
    assert ranks.verdict() == Termination(2, "rank 2 ended in step 5: ValueError: no rows")


def test_who_fails_hears_that_it_was_heard() -> None:
    ranks = Ranks(2)
    ranks.say(0, Kind.BYE, step=5, number=8, error="ValueError: no rows")
    assert (b"line of 0", 8) in [(line, message.number) for line, message in ranks.told]


def test_a_word_that_comes_after_a_later_one_is_no_news() -> None:
    ranks = Ranks(2)
    ranks.say(1, Kind.BARRIER, step=4, number=1, what="another shape", inside=True, word=6)
    ranks.say(1, Kind.HEARTBEAT, step=3, doing=RUNNING, runs="train", word=5)  # another thread's
    ranks.beat(0, 3)
    assert ranks.center.verdict is None, "rank 0 may be about to end step 3"
    ranks.beat(0, 4)
    assert "rank 1 is at 'another shape', and rank 0 runs train" in ranks.verdict().what


def test_another_program_in_the_same_step_is_named() -> None:
    ranks = Ranks(2)
    ranks.beat(0, 4, runs="train with 8 rows")
    ranks.beat(1, 4, runs="train with 16 rows")
    assert ranks.verdict().differs
    assert "8 rows, and rank 1 train with 16 rows" in ranks.verdict().what


def test_ranks_at_different_places_are_named() -> None:
    ranks = Ranks(2)
    ranks.say(0, Kind.BARRIER, number=1, what="saving")
    ranks.say(1, Kind.BARRIER, number=1, what="restoring")
    assert ranks.verdict() == Termination(
        1, "rank 0 is at 'saving', and rank 1 at 'restoring'", differs=True
    )
    assert all(message.kind is not Kind.PARTS for _, message in ranks.told), "nobody is answered"


def test_one_that_asks_between_steps_is_waited_for_only_by_those_who_go_on() -> None:
    ranks = Ranks(2)
    ranks.beat(1, 3)
    ranks.say(0, Kind.BARRIER, step=3, number=1, what="saving")
    assert ranks.center.verdict is None, "rank 1 may be about to end step 3"
    ranks.beat(1, 4)
    assert "rank 0 is at 'saving', and rank 1 runs train" in ranks.verdict().what


def test_one_that_asks_within_a_step_that_others_run_is_named() -> None:
    ranks = Ranks(2)
    ranks.beat(1, 3)
    ranks.say(0, Kind.BARRIER, step=3, number=1, what="another shape", inside=True)
    assert "rank 0 is at 'another shape', and rank 1 runs train" in ranks.verdict().what


def test_ranks_that_ran_other_steps_are_named_wherever_they_meet() -> None:
    said = "ranks 0 and 1 have run different steps, or the same in another order: last, rank 0 ran "
    for kind in (Kind.BARRIER, Kind.BYE):
        ranks = Ranks(2)
        ranks.say(0, kind, step=2, number=1, what="saving", ran="ab", last="b in step 2")
        assert ranks.center.verdict is None
        ranks.say(1, kind, step=2, number=1, what="saving", ran="ba", last="a in step 2")
        wanted = Termination(1, f"{said}b in step 2, and rank 1 a in step 2", differs=True)
        assert ranks.verdict() == wanted
        assert all(message.kind is Kind.HEARTBEAT for _, message in ranks.told)


def test_the_first_line_that_differs_is_found() -> None:
    texts = [["a", "b"], ["a", "b"], ["a", "c"], ["a"]]
    given = {
        "comparing": [f"{lines}".encode() for lines in texts],
        "comparing line by line": [zlib.compress("\n".join(lines).encode()) for lines in texts],
    }
    said = "rank 2 and rank 3 differ from rank 0; line 2: rank 0 has 'b', rank 2 'c'"
    assert first_difference(texts[0], lambda part, _: given[part]) == said
    assert first_difference(texts[0], lambda _, data: [data, data]) is None
