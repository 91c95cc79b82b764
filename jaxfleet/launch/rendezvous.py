"""Rendezvous of a job's launches, one on each machine, before every start of its ranks.

Machines may be missing: a start has those that came, if they are enough. The launch of the first
machine decides which, so no two parts of a job can go on without each other. That machine is
therefore the one that may not be missing.

A launch asks twice a second until it gets the decision, which is repeated to each that asks.
`Rendezvous` is the state machine of the first machine, without connections or clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.transport.messages import Plain

LAST_CALL_S = 60.0  # ranks elsewhere fail `lost_after_s` (10 s) after a loss, and are stopped then
SILENT_S = 15.0  # after which a launch that waits is gone


@dataclass(frozen=True)
class Meeting:
    """The machines of one start.

    Attributes:
        start: its number.
        ranks: the number of ranks of each machine, by name; those missing are left out.
    """

    start: int
    ranks: Mapping[str, int]

    def plain(self) -> dict[str, Plain]:
        return {"start": self.start, "ranks": dict(self.ranks)}

    @staticmethod
    def of(body: Mapping[str, Plain]) -> "Meeting | None":
        """Returns the meeting in an answer, None if it has none."""
        start, ranks = body.get("start"), body.get("ranks")
        if not isinstance(start, int) or not isinstance(ranks, dict):
            return None
        return Meeting(start, {name: n for name, n in ranks.items() if isinstance(n, int)})


@dataclass(frozen=True)
class Call:
    """A launch's request for the next start.

    Attributes:
        job: the job's name.
        machine: this machine's, as in the list of all.
        session: distinguishes this launch from an earlier one of the machine.
        ranks: the number of ranks that it can have.
        after: the last start that it took part in, -1 for none.
    """

    job: str
    machine: str
    session: str
    ranks: int
    after: int = -1

    def plain(self) -> dict[str, Plain]:
        return {**vars(self)}

    @staticmethod
    def of(body: Mapping[str, Plain]) -> "Call | None":
        """Returns the call in a message, None if it is malformed."""
        ranks, after = body.get("ranks"), body.get("after")
        if not isinstance(ranks, int) or not isinstance(after, int) or ranks < 1:
            return None
        words = [str(body.get(name, "")) for name in ("job", "machine", "session")]
        return Call(words[0], words[1], words[2], ranks, after)


@dataclass
class Rendezvous:
    """Decides which machines each start has.

    A start has all machines of the last one (of the job, for the first start) and those that have
    come back meanwhile. It begins once all of these have asked for it, or `last_call_s` after
    enough of them have, the first machine included. A machine that comes back takes part in the
    next start, which it does not bring about.

    Attributes:
        job: the job's name.
        machines: all, in their order; the first is this one.
        least: the number of machines that are enough.
        last_call_s: how long a start waits for more of them.
        meeting: the present start.
    """

    job: str
    machines: Sequence[str]
    least: int
    last_call_s: float = LAST_CALL_S
    meeting: Meeting | None = None
    _members: dict[str, str] = field(default_factory=dict)  # sessions, by machine
    _calls: dict[str, tuple[Call, float]] = field(default_factory=dict)  # with their last time
    _enough_s: float | None = None  # since when enough have asked for the next start

    def hear(self, call: Call, now_s: float) -> dict[str, Plain]:
        """Records a request, and returns the answer to it."""
        if call.job != self.job or call.machine not in self.machines:
            what = f"here meet the machines {', '.join(self.machines)} of job '{self.job}'"
            return {"refused": f"{what}, not {call.machine} of '{call.job}'"}
        if (found := self._meeting_of(call)) is not None:
            return found.plain()
        self._calls[call.machine] = (call, now_s)
        self._decide(now_s)
        if (found := self._meeting_of(call)) is not None:
            return found.plain()
        return {"waits": list(self.awaited)}

    def _meeting_of(self, call: Call) -> Meeting | None:
        """Returns the present start if it is the one that a launch asked for."""
        is_member = self._members.get(call.machine) == call.session
        has_begun = self.meeting is not None and call.after < self.meeting.start
        return self.meeting if is_member and has_begun else None

    @property
    def awaited(self) -> tuple[str, ...]:
        """The machines expected at the next start that have not asked for it."""
        expected = self.machines if self.meeting is None else tuple(self._members)
        return tuple(name for name in expected if name not in self._calls)

    def _decide(self, now_s: float) -> None:
        """Begins the next start if all machines, or enough of them, have asked for it."""
        silent = [name for name, (_, at) in self._calls.items() if now_s - at > SILENT_S]
        for name in silent:
            del self._calls[name]
        if len(self._calls) < self.least or self.machines[0] not in self._calls:
            self._enough_s = None
            return
        if self._enough_s is None:
            self._enough_s = now_s
        if self.awaited and now_s - self._enough_s < self.last_call_s:
            return
        calls = [self._calls[name][0] for name in self.machines if name in self._calls]
        start = 0 if self.meeting is None else self.meeting.start + 1
        self.meeting = Meeting(start, {call.machine: call.ranks for call in calls})
        self._members = {call.machine: call.session for call in calls}
        self._calls, self._enough_s = {}, None
