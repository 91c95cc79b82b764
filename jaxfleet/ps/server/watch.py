"""Looks at the time: who waits for somebody that will not come, and whether anybody lives."""

from dataclasses import dataclass, field

from jaxfleet.errors import JaxfleetError
from jaxfleet.ps.messages import Kind, Message
from jaxfleet.ps.server.deadlines import complaint
from jaxfleet.ps.server.desk import Desk, RefusedError, Request
from jaxfleet.ps.server.holder import Holder
from jaxfleet.ps.server.meetings import Meeting
from jaxfleet.ps.server.peers import Trainers
from jaxfleet.ps.server.together import Together
from jaxfleet.watch.notices import alert
from jaxfleet.watch.waits import LOGGED_AFTER_S

_SHOWN = 3  # names of missing items, and of waiting peers


@dataclass
class Watch:
    """Watches over all that waits at a server.

    Attributes:
        desk: where errors go.
        trainers: who is waited for, and how long.
        holder: has requests that wait.
        together: has meetings that wait.
        lively: when a trainer was last known to live.
    """

    desk: Desk
    trainers: Trainers
    holder: Holder
    together: Together
    lively: float
    _logged: set[tuple[str, int]] = field(default_factory=set)

    def look_at_waits(self, now: float) -> None:
        """Answers by errors those that wait for somebody who will not come."""
        for request in self.holder.waiting():
            if self._complain(request, self.holder.missing(request), now):
                self.holder.drop(request)
        for meeting in self.together.waiting():
            self._look_at(meeting, now)
        while (passed := self.together.passed_by()) is not None:
            meeting, refusal = passed
            self.tell_all(refusal)
            self.together.drop(meeting)

    def look_for_life(self, now: float) -> JaxfleetError | None:
        """Returns the error that ends the server where nobody lived for long."""
        trainers = self.trainers
        if not trainers.none_lives(now):
            self.lively = now
            return None
        options, lost = trainers.options, trainers.lost(now)
        patience = options.trainer_return_s if lost else None
        if now - self.lively > (options.step_timeout_s if patience is None else patience):
            how = "; ".join(trainers.ends(now)) or "no trainer ever came"
            return JaxfleetError(f"no trainer lives: {how}")
        return None

    def tell_all(self, refusal: RefusedError) -> None:
        """Tells all trainers what went wrong, those that wait by answers to what they asked."""
        waiting = self.holder.waiting() + self.together.requests()
        for request in waiting:
            self.desk.error(request.peer, request.message, refusal)
            self.holder.drop(request)
        told = {request.peer for request in waiting}
        for known in self.trainers.present():
            if known.peer not in told:
                word = Message(Kind.ERROR, self.desk.name, max(self.holder.step, 0))
                self.desk.error(known.peer, word, refusal)

    def _look_at(self, meeting: Meeting, now: float) -> None:
        what, _, name = meeting.key
        absent = self.together.absent(meeting)
        missing = {f"trainer {number}": [f"{what} '{name}'"] for number in absent}
        late = [self._complain(r, missing, now) for r in meeting.requests.values()]
        if any(late):
            self.together.drop(meeting)

    def _complain(self, request: Request, missing: dict[str, list[str]], now: float) -> bool:
        """Answers a request by an error where whom it waits for will not come."""
        found = complaint(
            request,
            missing,
            trainers=self.trainers,
            servers=self.holder.links.known,
            options=self.trainers.options,
            now=now,
        )
        if found is not None:
            self.desk.error(request.peer, request.message, found)
        elif missing:
            self._log(request, missing, now)
        return found is not None

    def _log(self, request: Request, missing: dict[str, list[str]], now: float) -> None:
        """Logs a wait once: the peer that is missing at a step, whichever other waits for it."""
        if now - request.since < LOGGED_AFTER_S:
            return
        peer, things = next(iter(missing.items()))
        if (peer, request.step) in self._logged:
            return
        self._logged = {key for key in self._logged if key[1] >= request.step - 1}
        self._logged.add((peer, request.step))
        waits = [r for r in self.holder.waiting() if r.step == request.step] or [request]
        names = ", ".join(dict.fromkeys(r.message.sender for r in waits[:_SHOWN]))
        missed = ", ".join(things[:_SHOWN])
        known = self.trainers.by_id if peer.startswith("trainer") else self.holder.links.known
        number = peer.rpartition(" ")[2]
        seen = known.get(int(number)) if number.isdigit() else None
        last = seen.text(now) if seen is not None else "it never said hello"
        alert(
            f"{self.desk.name}: {names} waits for {peer}: {missed} of step {request.step} "
            f"(for {now - request.since:.0f} s now; {last})"
        )
