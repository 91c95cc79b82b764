"""The coordinator on rank 0: tracks all ranks and answers them, in its own thread.

A rank sends hello until all have arrived, then heartbeats. Each joint operation is a numbered
request, answered once every rank has sent it. Any failure is a `Termination`; the first one wins
and goes to every rank.
"""

import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from jaxfleet.cluster.group_view import Termination
from jaxfleet.errors import ClosedError
from jaxfleet.observability import printable
from jaxfleet.transport.messages import Kind, Listener, Message, Peer, Plain, Tensor

RUNNING = "running"

Answers = list[tuple[Peer, Message]]


@dataclass
class _Seen:
    """State of one rank."""

    session: str  # distinguishes processes that claim the same rank
    line: Peer  # the connection of the last hello or heartbeat
    silent_s: float = 0.0  # seconds of silence, counted only while this process could receive
    word: int = 0  # number of its last message: messages of two threads may arrive out of order
    step: int = 0  # the last step it reported
    doing: str = ""  # its activity in that step
    runs: str = ""  # short description of the program and shapes that it runs in that step
    left_after: int | None = None  # the step after which it sent bye
    inside: bool = False  # it has begun the step but not yet run it
    ran: str = ""  # digest of everything it has run, as last reported
    last: str = ""  # description of the program that it ran last
    had: int = 0  # number of the last answer that it received

    def hear(self, body: Mapping[str, object]) -> None:
        self.ran, self.last = str(body.get("ran", "")), str(body.get("last", ""))

    def take_in(self, message: Message) -> None:
        """Records the reported activity, unless a later report came first."""
        body = message.body
        if isinstance(had := body.get("had"), int):
            self.had = max(self.had, had)
        word = body.get("word", self.word)
        if isinstance(word, int) and word >= self.word:
            self.word, self.step = word, message.step
            self.doing = printable(str(body.get("doing", "")))
            self.runs = printable(str(body.get("runs", "")))
            self.inside = body.get("inside") is True


@dataclass
class _Asked:
    """A joint request: the ranks that sent it, their payloads, and where to answer each."""

    what: str
    by: dict[int, tuple[Peer, tuple[Tensor, ...]]] = field(default_factory=dict)


class Coordinator:
    """State machine of the group.

    `coordinator` is the address of jax's own, announced to every rank.
    """

    def __init__(self, size: int, job: str, coordinator: str, *, lost_after_s: float) -> None:
        self.size, self.job, self.coordinator = size, job, coordinator
        self.lost_after_s = lost_after_s
        self.verdict: Termination | None = None
        self._seen: dict[int, _Seen] = {}
        self._asked: dict[int, _Asked] = {}
        self._answers: dict[int, Message] = {}  # kept until all ranks have them
        self._leaving: dict[int, tuple[Peer, Message]] = {}
        self._takes: dict[Kind, Callable[[int, Peer, Message], Answers]] = {
            Kind.HELLO: self._hello,
            Kind.HEARTBEAT: self._beat,
            Kind.BARRIER: self._ask,
            Kind.ERROR: self._give_up,
            Kind.BYE: self._bye,
        }

    @property
    def _came(self) -> bool:
        return len(self._seen) == self.size

    def take(self, line: Peer, message: Message) -> Answers:
        """Handles a message; returns the messages to send on each line."""
        rank = message.body.get("rank")
        take = self._takes.get(message.kind)
        if take is None or not isinstance(rank, int):
            return []
        if refused := self._refused(rank, line, message):
            return [(line, Message(Kind.ERROR, "rank 0", number=message.number, body=refused))]
        self._seen[rank].silent_s = 0.0
        if message.kind is not Kind.HELLO:
            self._seen[rank].take_in(message)
            self._let_go()
        before = self.verdict
        answers = take(rank, line, message)
        if before is None:
            self._judge(rank)
        return answers + (self._tell_all() if self.verdict is not before else [])

    def knows(self, message: Message) -> bool:
        """Whether a message comes from an admitted rank."""
        rank = message.body.get("rank")
        seen = self._seen.get(rank) if isinstance(rank, int) else None
        return seen is not None and seen.session == message.body.get("session")

    def passed(self, seconds: float) -> Answers:
        """Counts listening time; returns the messages about ranks that stayed silent too long.

        Wall-clock time does not count: while this whole process was suspended, no message could
        arrive.
        """
        if self.verdict is not None or not self._came:
            return []
        for rank, seen in self._seen.items():
            seen.silent_s += seconds
            if seen.left_after is None and seen.silent_s > self.lost_after_s and rank:
                said = f"its last report: {_said(seen)}"
                what = f"rank {rank} is lost: silent for {seen.silent_s:.1f} s; {said}"
                self._condemn(Termination(rank, what))
                return self._tell_all()
        return []

    def _refused(self, rank: int, line: Peer, message: Message) -> dict[str, Plain] | None:
        """Returns the reason to reject a message, if any; registers a first hello."""
        body = message.body
        session = str(body.get("session", ""))
        seen = self._seen.get(rank)
        if seen is not None and seen.session == session:
            return None
        if message.kind is not Kind.HELLO:
            return {"refused": f"rank {rank} has not sent a hello"}
        if body.get("job") != self.job or body.get("size") != self.size:
            theirs = f"rank {rank} of {body.get('size')} of job '{body.get('job')}'"
            return {"refused": f"here meet {self.size} ranks of job '{self.job}', not {theirs}"}
        if not 0 <= rank < self.size:
            return {"refused": f"there is no rank {rank} among {self.size}"}
        if seen is not None:
            return {"refused": f"another process is rank {rank} already"}
        self._seen[rank] = _Seen(session, line)
        return None

    def _hello(self, rank: int, line: Peer, _: Message) -> Answers:
        self._seen[rank].line = line
        body: dict[str, Plain] = {"came": [*self._seen], "coordinator": self.coordinator}
        to = [seen.line for seen in self._seen.values()] if self._came else [line]
        return [(each, Message(Kind.WELCOME, "rank 0", body=body)) for each in to]

    def _beat(self, rank: int, line: Peer, _: Message) -> Answers:
        self._seen[rank].line = line
        return [(line, self._news())]

    def _let_go(self) -> None:
        """Drops the answers that all ranks have received: a gather may be as large as a model."""
        all_had = min(seen.had for seen in self._seen.values())
        for number in [number for number in self._answers if number <= all_had]:
            del self._answers[number]

    def _ask(self, rank: int, line: Peer, message: Message) -> Answers:
        if message.number <= self._seen[rank].had:
            return []  # a late duplicate
        if (answered := self._answers.get(message.number)) is not None:
            return [(line, answered)]
        what = str(message.body.get("what", ""))
        known = self._asked.get(message.number)
        if message.body.get("again") is True:
            if known is None or rank not in known.by:  # its payload was lost on the way
                return [(line, Message(Kind.PENDING, "rank 0", number=message.number))]
            known.by[rank] = (line, known.by[rank][1])
            return []
        asked = self._asked.setdefault(message.number, _Asked(what))
        if asked.what != what:
            other = next(iter(asked.by))
            text = f"rank {other} is at '{asked.what}', and rank {rank} at '{what}'"
            self._condemn(Termination(rank, text, differs=True))
            return []  # the payloads are irrelevant: every rank receives the verdict
        self._seen[rank].hear(message.body)
        if self._ran_other(rank, next(iter(asked.by), rank)):
            return []
        asked.by[rank] = (line, message.tensors)
        if len(asked.by) < self.size:
            return []
        del self._asked[message.number]
        parts = [tensors for _, (_, tensors) in sorted(asked.by.items())]
        tensors = tuple(tensor for part in parts for tensor in part)
        answer = Message(Kind.PARTS, "rank 0", number=message.number, tensors=tensors)
        self._answers[message.number] = answer
        return [(line, answer) for line, _ in asked.by.values()]

    def _give_up(self, _: int, line: Peer, message: Message) -> Answers:
        verdict = Termination.of(message.body.get("verdict"))
        if verdict is not None:
            self._condemn(verdict)
        return [(line, Message(Kind.OK, "rank 0", number=message.number))]

    def _bye(self, rank: int, line: Peer, message: Message) -> Answers:
        seen = self._seen[rank]
        seen.left_after = message.step
        if why := message.body.get("error"):
            self._condemn(Termination(rank, f"rank {rank} ended in step {message.step}: {why}"))
        if self.verdict is not None:  # a failed group has no clean end
            return [(line, replace(self._news(), number=message.number))]
        seen.hear(message.body)
        for other, left in self._seen.items():
            if left.left_after == seen.left_after and self._ran_other(rank, other):
                return []
        self._leaving[rank] = (line, Message(Kind.OK, "rank 0", number=message.number))
        return [*self._leaving.values()] if len(self._leaving) == self.size else []

    def _ran_other(self, rank: int, other: int) -> bool:
        """Whether two ranks that meet have run different programs, or in a different order."""
        mine, theirs = self._seen[rank], self._seen[other]
        if mine.ran == theirs.ran:
            return False
        what = f"ranks {other} and {rank} have run different steps, or the same in another order"
        what = f"{what}: last, rank {other} ran {theirs.last}, and rank {rank} {mine.last}"
        self._condemn(Termination(rank, what, differs=True))
        return True

    def _judge(self, spoke: int) -> None:
        """Looks for a failure after a message of this rank: a wait that can never end."""
        waiting = {rank for asked in self._asked.values() for rank in asked.by}
        for other in self._seen:
            for pair in ((other, spoke), (spoke, other)):
                verdict = self._at_odds(*pair, waiting)
                if verdict is not None:
                    return self._condemn(verdict)
        return None

    def _at_odds(self, rank: int, other: int, waiting: Container[int]) -> Termination | None:
        """Returns the reason why one rank's wait for another can never end, if any."""
        seen, its = self._seen[rank], self._seen[other]
        asks, runs = other in waiting, its.doing == RUNNING
        # A rank that leaves has received the answers to all its requests.
        if seen.left_after is not None and (asks or (runs and its.step > seen.left_after)):
            said = f"rank {other} waits for it: {_said(its)}"
            what = f"rank {rank} left after step {seen.left_after}, and {said}"
            return Termination(rank, what, left=True)
        if runs and rank in waiting and its.step > seen.step - seen.inside:
            what = f"rank {rank} is at '{seen.doing}', and rank {other} runs {its.runs}"
            return Termination(other, what, differs=True)
        same_step = runs and seen.step == its.step
        if same_step and seen.runs != its.runs and seen.runs and its.runs:
            what = f"rank {rank} runs {seen.runs}, and rank {other} {its.runs}"
            return Termination(other, what, differs=True)
        return None

    def _condemn(self, verdict: Termination) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self._asked.clear()
            self._answers.clear()

    @property
    def kept_bytes(self) -> int:
        """Bytes of payloads kept for ranks that have not received them yet."""
        brought = [tensors for asked in self._asked.values() for _, tensors in asked.by.values()]
        answers = [answer.tensors for answer in self._answers.values()]
        return sum(tensor.array.nbytes for tensors in (*brought, *answers) for tensor in tensors)

    def _tell_all(self) -> Answers:
        return [(seen.line, self._news()) for seen in self._seen.values()]

    def _news(self) -> Message:
        """Returns the answer to a heartbeat: the activity of all ranks."""
        ranks: list[Plain] = [
            {"rank": rank, "step": x.step, "doing": x.doing, "left": x.left_after is not None}
            for rank, x in sorted(self._seen.items())
        ]
        verdict = None if self.verdict is None else self.verdict.body()
        return Message(Kind.HEARTBEAT, "rank 0", body={"ranks": ranks, "verdict": verdict})


def _said(seen: _Seen) -> str:
    return f"step {seen.step}, {seen.doing or 'nothing'}"


_LISTEN_S = 0.2  # the longest silence that goes uncounted
_CLOSING_S = 5.0


class CoordinatorThread:
    """Runs the coordinators of one or several groups at one address, until closed."""

    def __init__(self, coordinators: Sequence[Coordinator], listener: Listener) -> None:
        self.coordinators, self._listener = coordinators, listener
        self._by_session: dict[str, Coordinator] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxfleet-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._listener.wake()
        self._thread.join(_CLOSING_S)
        self._listener.close()

    def _run(self) -> None:
        counted_s = time.monotonic()
        with suppress(ClosedError):
            while not self._closing.is_set():
                arrived = self._listener.receive(_LISTEN_S)
                now_s = time.monotonic()
                # A larger gap means that this process was suspended, when no message could arrive.
                for each in self.coordinators:
                    self._send(each.passed(min(now_s - counted_s, 2 * _LISTEN_S)))
                counted_s = now_s
                if arrived is not None:
                    self._take(*arrived)

    def _take(self, line: Peer, message: Message) -> None:
        """Hands a message to its group's coordinator; one of no group is refused by the first."""
        session, job = str(message.body.get("session", "")), message.body.get("job")
        named = (each for each in self.coordinators if each.job == job)
        coordinator = self._by_session.get(session) or next(named, self.coordinators[0])
        self._send(coordinator.take(line, message))
        if coordinator.knows(message):
            self._by_session[session] = coordinator
            self._listener.trust(line)

    def _send(self, answers: Answers) -> None:
        for line, message in answers:
            self._listener.send(line, message)
