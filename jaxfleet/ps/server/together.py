"""Does what all trainers ask for together: each meeting ends when the last of them came."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfleet.ps.hints import same_leaves_hint
from jaxfleet.ps.messages import Kind, Message
from jaxfleet.ps.server.desk import Desk, RefusedError, Request, refusal_of, text_of
from jaxfleet.ps.server.holder import Holder
from jaxfleet.ps.server.meetings import Key, Meeting, Meetings, reduce_tensors, why_not_reduced
from jaxfleet.ps.server.peers import Trainers

_SHOWN = 6  # leaves of a state, in an error
_END = 1 << 62  # after all steps


@dataclass
class Together:
    """The meetings of a server's trainers.

    Attributes:
        desk: where answers go.
        trainers: who may come.
        holder: takes a state that all bring.
        most_bytes: the most that the requests of one trainer may hold.
    """

    desk: Desk
    trainers: Trainers
    holder: Holder
    most_bytes: int
    _meetings: Meetings = field(default_factory=Meetings)

    def assign(self, request: Request) -> None:
        """Takes the first state at once, and one that replaces another when all sent it.

        Raises:
            RefusedError: the server cannot hold it, or too much waits already.
        """
        message = request.message
        if not message.body.get("replace"):
            self.holder.assign(request)
            return
        self.holder.check_assign(message)
        names = ",".join(sorted(tensor.name for tensor in message.tensors))
        key = ("assign", request.step, names)
        for meeting in self.waiting():
            if meeting.key[:2] == key[:2] and meeting.key != key:
                found = [*meeting.in_order(), message]
                refusal = _other_leaves(request.step, [(m.sender, _leaves(m)) for m in found])
                self._refuse(meeting, refusal)
                raise refusal
        self._join(key, request)

    def passed_by(self) -> tuple[Meeting, RefusedError] | None:
        """Returns a meeting for a state that some trainer went past, and what is wrong."""
        for meeting in self.waiting():
            kind, step, _ = meeting.key
            known = self.trainers.by_id
            gone = [n for n in self.absent(meeting) if n in known and known[n].pushed > step]
            if kind == "assign" and gone:
                gave = [(m.sender, _leaves(m)) for m in meeting.in_order()]
                refusal = _other_leaves(step, [*gave, *((f"trainer {n}", "none") for n in gone)])
                return meeting, refusal
        return None

    def _refuse(self, meeting: Meeting, refusal: RefusedError) -> None:
        self._meetings.drop(meeting)
        for request in meeting.requests.values():
            self.desk.error(request.peer, request.message, refusal)

    def reduce(self, request: Request) -> None:
        """Reduces arrays over all trainers.

        Raises:
            RefusedError: they cannot be reduced so, are not like the others', or too much waits.
        """
        message = request.message
        key = ("reduce", message.step, text_of(message, "key"))
        how = text_of(message, "how")
        misfit = why_not_reduced(how, message) or self._meetings.misfit(key, message)
        if misfit is not None:
            raise RefusedError("bad_message", f"'{key[2]}' of step {message.step}: {misfit}")
        self._join(key, request)

    def barrier(self, request: Request) -> None:
        """Waits for all trainers.

        Raises:
            RefusedError: it does not say at which barrier, or too much waits already.
        """
        self._join(("barrier", request.step, text_of(request.message, "name")), request)

    def waiting(self) -> list[Meeting]:
        """Returns the meetings that somebody is waited for in."""
        return self._meetings.waiting()

    def requests(self) -> list[Request]:
        """Returns the requests of all who wait."""
        return [r for meeting in self.waiting() for r in meeting.requests.values()]

    def absent(self, meeting: Meeting) -> list[int]:
        """Returns who has not come to a meeting yet."""
        return [n for n in self._wanted(meeting) if n not in meeting.requests]

    def drop(self, meeting: Meeting) -> None:
        """Forgets a meeting that will not be."""
        self._meetings.drop(meeting)

    def one_left(self) -> None:
        """Ends meetings that waited for nobody but one who said bye."""
        for meeting in self.waiting():
            self._complete(meeting)

    def forget_strangers(self) -> None:
        """Forgets all, of which nothing came from the job's trainers."""
        self._meetings = Meetings()

    def forget_process(self, trainer: int) -> None:
        """Forgets what a trainer asked as another process, whose requests had other numbers."""
        self._meetings.forget(_END)
        for meeting in self.waiting():
            meeting.requests.pop(trainer, None)

    def forget(self) -> None:
        """Forgets all answers, which are void."""
        self._meetings.forget(_END)
        self.trainers.rewind()

    def _join(self, key: Key, request: Request) -> None:
        self._meetings.check_room(key, request, self.most_bytes)
        meeting = self._meetings.join(key, request)
        if meeting.answer is not None:
            self._answer(meeting, request)
        else:
            self._complete(meeting)

    def _complete(self, meeting: Meeting) -> None:
        """Ends a meeting if all came."""
        if not meeting.requests or self.absent(meeting):
            return
        if meeting.key[0] == "reduce" and not self._reduced(meeting):
            return
        meeting.answer = meeting.answer or ()
        if meeting.key[0] == "assign":
            first = meeting.in_order()[0]
            self.holder.replace(first, lambda: self._answer_all(meeting))
        else:
            self._answer_all(meeting)
        steps = [known.step for known in self.trainers.present()]
        self._meetings.forget(min(steps, default=0) - 1)

    def _reduced(self, meeting: Meeting) -> bool:
        """Reduces what all brought; tells them where it cannot be done."""
        requests = meeting.in_order()
        try:
            meeting.answer = reduce_tensors(str(requests[0].body["how"]), requests)
        except (TypeError, ValueError) as error:
            self._meetings.drop(meeting)
            for request in meeting.requests.values():
                self.desk.error(request.peer, request.message, refusal_of("failed", error))
            return False
        return True

    def _wanted(self, meeting: Meeting) -> Sequence[int]:
        """Returns who must come; at a barrier those that left are not waited for."""
        is_barrier = meeting.key[0] == "barrier"
        return self.trainers.staying() if is_barrier else range(self.trainers.count)

    def _answer_all(self, meeting: Meeting) -> None:
        for request in meeting.requests.values():
            self._answer(meeting, request)

    def _answer(self, meeting: Meeting, request: Request) -> None:
        kind = Kind.REDUCED if meeting.key[0] == "reduce" else Kind.OK
        self.desk.answer(request.peer, request.message, kind, {}, meeting.answer or ())


def _other_leaves(step: int, gave: Sequence[tuple[str, str]]) -> RefusedError:
    """Returns that trainers put other leaves into the state after a step.

    Args:
        step: which.
        gave: trainers, and which leaves each gave.
    """
    listed = "; ".join(f"{sender} gave {leaves}" for sender, leaves in gave)
    what = f"trainers replaced other leaves of the state than each other after step {step}"
    return RefusedError("refused", f"{what}: {listed}", hint=same_leaves_hint("trainer"))


def _leaves(message: Message) -> str:
    """Returns the leaves that an assign brings, without their slices: `'state/epoch'`."""
    names = dict.fromkeys(re.sub(r"\.block\d+$", "", tensor.name) for tensor in message.tensors)
    shown = ", ".join(f"'{name}'" for name in list(names)[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown or "none"
