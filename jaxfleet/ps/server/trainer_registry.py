"""Registry of a job's trainers: hellos, heartbeats, losses and departures."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfleet.observability import printable
from jaxfleet.ps.server.options import ServerOptions
from jaxfleet.ps.server.peer_state import Departures, PeerState, TrainerReport
from jaxfleet.transport.consistency import describe_difference
from jaxfleet.transport.messages import PROTOCOL, Kind, Message, Peer, Plain

_LONGEST = 200  # characters of a trainer's activity, and of its session
_PUSHES = frozenset({Kind.PUSH, Kind.PUSH_ROWS})
_DIGEST, _DIGEST_SHOWN = 64, 12  # characters
_MOST_MOVED = 1024  # broken connections, of all trainers
_MOST_REFUSED = 1024  # rejected trainers whose reason is kept for errors
_FACTS = ("job", "trainers", "servers", "program")  # on which all trainers must agree


@dataclass
class TrainerRegistry:
    """The trainers of a job, which must all agree on it.

    Attributes:
        facts: the job as the first trainer described it.
        restored: hash of the program that the server resumes.
        text: packed text of that program, or of the first trainer's; None if unknown.
        refused: reasons why other trainers of the job were rejected.
        gone: departures before this server was restarted.
    """

    options: ServerOptions
    facts: dict[str, Plain] = field(default_factory=dict)
    first: int = -1
    restored: str | None = None
    text: np.ndarray | None = None
    versions: Plain = None
    by_id: dict[int, PeerState] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    gone: Departures | None = None
    _ids: dict[Peer, int] = field(default_factory=dict)
    _came: dict[int, float] = field(default_factory=dict)
    _before_hello: dict[int, float] = field(default_factory=dict)  # last heartbeats
    _moved: dict[Peer, Peer] = field(default_factory=dict)  # replaced connections

    def __post_init__(self) -> None:
        self._told = self.options

    @property
    def count(self) -> int:
        """Number of trainers of the job, 0 before the first hello."""
        told = self.options.trainers or (self.gone.trainers if self.gone is not None else 0)
        count = self.facts.get("trainers", told)
        assert isinstance(count, int)
        return count

    @property
    def _job(self) -> Plain:
        """The job's name, once known; trainers of another job are strangers."""
        return self.facts.get("job", self.options.job)

    def id_of(self, peer: Peer) -> int | None:
        return self._ids.get(peer)

    def newest(self, peer: Peer) -> Peer:
        """Returns the connection that replaced this one, or this one."""
        return self._moved.get(peer, peer)

    def hello(self, peer: Peer, message: Message, now: float) -> str | None:
        body = message.body
        if (refusal := _malformed(body)) is not None:
            return refusal
        number = body["trainer"]
        assert isinstance(number, int)
        text = next((t.array for t in message.tensors if t.name == "program"), None)
        if (refusal := self._unlike(body, text)) is not None:
            is_room = number in self.refused or len(self.refused) < _MOST_REFUSED
            if body.get("job") == self._job and number not in self.by_id and is_room:
                self.refused[number] = refusal  # reported to trainers that wait for it
            return refusal
        if (refusal := self._taken(peer, body, now)) is not None:
            return refusal
        self.refused.pop(number, None)
        if not self.facts:
            self.facts = {name: body[name] for name in _FACTS}
            self.first = number
            self.versions = body.get("versions")
            if self.text is None and text is not None and text.dtype == np.uint8:
                self.text = text.copy()
        old, session = self.by_id.get(number), body.get("session")
        joins = old.joins + (old.session != session) if old is not None else 1
        step = body.get("step")
        known = PeerState(peer, now, now, session=session, joins=joins, life=_life(body))
        known.step = step if _is_count(step) else 0  # type: ignore[assignment]  # a restarted server
        if old is not None:
            self._ids.pop(old.peer, None)
            if session is not None and session == old.session:
                known = replace(
                    known,
                    left=old.left,
                    seen=old.seen,
                    step=max(known.step, old.step),
                    pushed=old.pushed,
                    late_s=old.late_s,
                    own_s=old.own_s,
                    report=old.report,
                    beats=old.beats,
                    has_stopped=old.has_stopped,
                    log=old.log,
                )
                self._move(old.peer, peer)
            elif self.may_return:
                known = replace(known, seen=old.step, step=old.step, pushed=old.pushed)
        self._ids[peer] = number
        self.by_id[number] = known
        if self.gone is not None and self.gone.is_of_another_run(number, session):
            self.gone = None
        return None

    def _move(self, old: Peer, new: Peer) -> None:
        """Redirects replies to a new connection of the same process."""
        moved = {peer: new if to == old else to for peer, to in self._moved.items()}
        moved[old] = new
        self._moved = dict(list(moved.items())[-_MOST_MOVED:])
        self._moved.pop(new, None)

    def forget(self) -> None:
        """Discards all trainers as strangers, with their description of the job."""
        self.options, self.facts, self.first = self._told, {}, -1
        self.versions = None
        if self.restored is None:
            self.text = None
        self.by_id.clear()
        self.refused.clear()
        self._ids.clear()

    def heard(self, peer: Peer, message: Message, now: float) -> None:
        known = self.by_id[self._ids[peer]]
        known.heard = now
        if message.kind in _PUSHES:
            known.pushed = max(known.pushed, message.step)
        counts = message.kind is not Kind.LOAD and not message.body.get("rewinds")
        if counts and message.step > known.step:
            known.step = message.step
            known.late_s += now - self._came.setdefault(message.step, now)
            if known.answered is not None:
                known.own_s += now - known.answered
            least = min(known.step for known in self.present())
            self._came = {step: at for step, at in self._came.items() if step >= least}

    def disconnected(self, peer: Peer, now: float) -> None:
        """Records that a connection has ended: its process has, or connects again."""
        for each in self.by_id.values():
            each.has_stopped |= each.beats == peer
        known = self.by_id.get(self._ids.get(peer, -1))
        if known is not None and known.peer == peer:
            known.ended = now

    def rewind(self, step: int) -> None:
        """Resets the trainers' steps: all continue from another state, after a step."""
        for known in self.by_id.values():
            known.pushed, known.step = 0, min(known.step, step)

    def of_session(self, message: Message) -> PeerState | None:
        """Returns the sender of a heartbeat, which its session identifies on any connection."""
        known, session = self.by_id.get(trainer_number(message)), message.body.get("session")
        if known is not None and known.session == session:
            return known
        return self.process(session) if isinstance(session, str) and session else None

    def place_of(self, message: Message) -> int:
        """Returns the number that the sender of a heartbeat has here; -1 if it has none yet."""
        known = self.of_session(message)
        return next((n for n, each in self.by_id.items() if each is known), -1)

    def process(self, session: str) -> PeerState | None:
        """Returns a process, whose number may just change."""
        return next((known for known in self.by_id.values() if known.session == session), None)

    def expect(self, count: int) -> None:
        """Expects the trainers of the program that a restarted server has, of whatever epoch."""
        if self.options.trainers is not None:
            self.options = self._told = replace(self.options, trainers=count)

    def begin_epoch(self, count: int) -> None:
        """Discards all trainers, for those of another membership, whose hellos follow."""
        self.restored, self.gone = None, None
        self.expect(count)
        options = self.options
        self.forget()
        self.options = options
        self._came.clear()
        self._moved.clear()

    def beat(self, peer: Peer, message: Message, now: float) -> None:
        number = trainer_number(message)
        if number not in self.by_id and 0 <= number < self.count:
            self._before_hello[number] = now  # this server was started again, and the hello is late
        if (known := self.of_session(message)) is not None:
            known.heard = known.said = now
            known.beats, known.has_stopped = peer, False
            known.doing = printable(str(message.body.get("doing", "")), _LONGEST)
            known.report = TrainerReport.of(message.body)

    def heard_before_hello(self, number: int) -> float:
        """Returns when a trainer without a hello sent its last heartbeat; -inf if never."""
        return self._before_hello.get(number, -math.inf)

    def is_lost(self, number: int, now: float) -> bool:
        """Whether a connected trainer has been silent for too long."""
        known = self.by_id.get(number)
        if known is None or known.left:
            return False
        return now - known.heard > self.options.lost_after_s

    @property
    def may_return(self) -> bool:
        """Whether the job waits for a lost trainer."""
        return self.options.trainer_return_s is not None

    def patience_s(self) -> float:
        """How long a trainer may be silent before the others fail."""
        options = self.options
        if options.goes_on:  # server 0 takes it out of the job after `lost_after_s`
            return 3 * options.lost_after_s
        return options.lost_after_s + (options.trainer_return_s or 0.0)

    def is_under_way(self, trainer: int) -> bool:
        """Whether other trainers than this one have begun to train."""
        return any(known.step > 0 for number, known in self.by_id.items() if number != trainer)

    def awaited(self, now: float) -> str:
        """Describes the lost trainers that may return: `waits 42 s more for trainer 1`."""
        if not self.may_return:
            return ""
        gone = [n for n in self.by_id if self.is_lost(n, now)]
        if not gone:
            return ""
        names = ", ".join(f"trainer {number}" for number in gone)
        left_s = min(self._left_s(number, now) for number in gone)
        return f"waits {left_s:.0f} s more for {names} to return"

    def doing(self, number: int, now: float) -> str:
        """Returns the last activity of a trainer, or how long a lost one is still waited for."""
        last = self.by_id[number].doing
        if not (self.may_return and self.is_lost(number, now)):
            return last
        return f"lost, and waited for {self._left_s(number, now):.0f} s more; last: {last}"

    def _left_s(self, number: int, now: float) -> float:
        return max(self.patience_s() - (now - self.by_id[number].heard), 0.0)

    def lost(self, now: float) -> list[str]:
        """Returns the lost trainers: `trainer 1`."""
        return [f"trainer {number}" for number in self.by_id if self.is_lost(number, now)]

    def ends(self, now: float) -> list[str]:
        """Describes each lost or rejected trainer, and those that the others waited for."""
        gone = [(n, self.by_id[n]) for n in self.by_id if self.is_lost(n, now)]
        lost = [f"trainer {number}, {known.text(now)}" for number, known in gone]
        came = {*self.by_id, *self.refused}
        absent = [f"trainer {n} never came" for n in self.staying() if came and n not in came]
        refused = [f"trainer {n} was refused: {why}" for n, why in self.refused.items()]
        return [*lost, *refused, *absent]

    def all_left(self) -> bool:
        return 0 < self.count <= len(self.left())

    def left(self) -> dict[int, Plain]:
        """Returns the sessions of trainers that left this server or its predecessor."""
        gone = self.gone.sessions if self.gone is not None else {}
        left = {n: known.session for n, known in self.by_id.items() if known.left}
        return {**{n: said for n, said in gone.items() if n not in self.by_id}, **left}

    def departed(self) -> Departures:
        """Returns the departures, to be read by a restarted server."""
        left = self.left()
        before = self.gone.present if self.gone is not None else {}
        came = {**before, **{n: known.session for n, known in self.by_id.items()}}
        return Departures(self.count, left, {n: said for n, said in came.items() if n not in left})

    def none_lives(self, now: float) -> bool:
        return all(known.left or self.is_lost(n, now) for n, known in self.by_id.items())

    def staying(self) -> list[int]:
        left = self.left()
        return [n for n in range(self.count) if n not in left]

    def present(self) -> Iterable[PeerState]:
        """Returns the connected trainers that have not left."""
        return [known for known in self.by_id.values() if not known.left]

    def _unlike(self, body: Mapping[str, Plain], text: np.ndarray | None) -> str | None:
        """Describes a hello's difference from the options or from the first trainer, if any."""
        number = body["trainer"]
        wanted: dict[str, Plain] = {}
        if self.options.job is not None:
            wanted["job"] = self.options.job
        if self.options.trainers is not None:
            wanted["trainers"] = self.options.trainers
        if self.restored is not None:
            wanted["program"] = self.restored
        first = f"trainer {self.first} reports"
        for values, other in ((wanted, "the server"), (self.facts, first)):
            for name, value in values.items():
                if body.get(name) != value:
                    found = f"trainer {number} reports {name} {_short(body.get(name))}, and {other}"
                    return f"{found} {_short(value)}{self._where(name, body, text)}"
        return None

    def _where(self, name: str, body: Mapping[str, Plain], text: np.ndarray | None) -> str:
        if name != "program":
            return ""
        theirs = body.get("versions")
        made = ""
        if isinstance(theirs, str) and isinstance(self.versions, str) and theirs != self.versions:
            made = f"; it runs {theirs[:_LONGEST]}, and trainer {self.first} {self.versions}"
        return describe_difference(self.text, text) + made

    def _taken(self, peer: Peer, body: Mapping[str, Plain], now: float) -> str | None:
        number = body["trainer"]
        assert isinstance(number, int)
        other = self._ids.get(peer)
        if other is not None and other != number:
            return f"this connection is trainer {other}'s, and claims to be trainer {number}"
        old = self.by_id.get(number)
        if old is None or old.peer == peer:
            return None
        session = body.get("session")
        if session is not None and session == old.session:
            return None
        if self.may_return and not old.left and _life(body) != old.life:
            if _life(body) > old.life:
                return None
            return f"trainer {number} was started again, and another process has its place"
        if old.left or self.is_lost(number, now):
            return None
        return f"there is a trainer {number} already, {old.text(now)}"


def trainer_number(message: Message) -> int:
    """Returns the number of the trainer that sent a message, -1 if invalid."""
    number = message.sender.removeprefix("trainer ")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 8 else -1


def _malformed(body: Mapping[str, Plain]) -> str | None:
    """Returns the reason that a body is not a valid hello, if so."""
    protocol = body.get("protocol")
    if protocol != PROTOCOL:
        return f"the trainer uses protocol {protocol}, and this server {PROTOCOL}"
    session = body.get("session")
    if session is not None and (not isinstance(session, str) or len(session) > _LONGEST):
        return "a session is a short text"
    number, count, servers = (body.get(key) for key in ("trainer", "trainers", "servers"))
    if not _is_count(count) or not _is_count(number) or not isinstance(servers, list):
        return f"a hello needs trainer, trainers and servers, and has {sorted(body)}"
    assert isinstance(number, int)
    assert isinstance(count, int)
    return f"there is no trainer {number} of {count}" if number >= count else None


def _life(body: Mapping[str, Plain]) -> int:
    life = body.get("life")
    return life if isinstance(life, int) and _is_count(life) else 0


def _is_count(value: Plain) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 20


def _short(value: Plain) -> Plain:
    is_digest = isinstance(value, str) and len(value) == _DIGEST
    return f"{value[:_DIGEST_SHOWN]}..." if is_digest and isinstance(value, str) else value
