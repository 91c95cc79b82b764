"""Liveness of a server's peers: lost messages, timeouts of requests, the end without trainers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.errors import JaxfleetError
from jaxfleet.observability.notices import LOGGED_AFTER_S, alert
from jaxfleet.ps.server.collectives import Collective, CollectiveHandler
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError
from jaxfleet.ps.server.peer_state import PeerState
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Kind, Message, Plain

_MOST_PENDING = 1024  # maximum number of requests in one `pending`
_SHOWN = 3  # maximum number of missing names shown


@dataclass
class LivenessMonitor:
    """Detects waits for lost peers."""

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    collectives: CollectiveHandler
    lively: float
    _logged: set[tuple[str, int]] = field(default_factory=set)

    def look_at_waits(self, now: float) -> None:
        """Answers requests with errors if their peers are lost."""
        for request in self.router.waiting():
            if self._complain(request, self.router.missing(request), now):
                self.router.drop(request)
        self.collectives.drop_replayed()
        for meeting in self.collectives.waiting():
            self._look_at(meeting, now)
        while (passed := self.collectives.passed_by()) is not None:
            meeting, refusal = passed
            self.tell_all(refusal)
            self.collectives.drop(meeting)

    def look_for_life(self, now: float) -> JaxfleetError | None:
        """Returns the error that ends a server without live trainers."""
        trainers = self.trainers
        if not trainers.none_lives(now):
            self.lively = now
            return None
        options = trainers.options
        patience = options.step_timeout_s
        if trainers.lost(now) and options.trainer_return_s is not None:
            patience = options.trainer_return_s  # since they were lost
        elif not trainers.by_id and not trainers.left():  # imports may take longer than a step
            patience = max(patience, options.connect_s)
        if now - self.lively > patience:
            how = "; ".join(trainers.ends(now)) or "no trainer ever came"
            return JaxfleetError(f"no trainer lives: {how}")
        return None

    def forgive(self, seconds: float, now: float) -> None:
        """Discounts waits while this process was suspended."""
        self.lively = min(self.lively + seconds, now)
        for request in (*self.router.waiting(), *self.collectives.requests()):
            request.since = min(request.since + seconds, now)

    def pending(self, request: Request) -> None:
        """Replies with the requests and pushes of a trainer that have not arrived."""
        numbers = request.message.body.get("numbers")
        if not isinstance(numbers, list) or len(numbers) > _MOST_PENDING:
            raise RequestError("bad_message", "a pending needs 'numbers', a short list")
        pushed = request.message.body.get("pushed", -1)
        if not isinstance(pushed, int):
            raise RequestError("bad_message", "'pushed' of a pending is the step of a push")
        trainer, log = request.trainer, self.trainers.by_id[request.trainer].log
        mine = [r for r in self.router.waiting() if r.trainer == trainer]
        others = [r for r in self.collectives.requests() if r.trainer == trainer]
        here = {r.message.number for r in (*mine, *others)} | log.pending
        missing: list[Plain] = []
        for number in numbers:
            answer = log.answer(number) if isinstance(number, int) else None
            if answer is not None:
                self.outbox.out.append((request.peer, answer))
            elif number not in here:
                missing.append(number)
        body: dict[str, Plain] = {
            "missing": missing,
            "lacks": self.router.lacks_push(trainer, pushed) or any(map(self.router.lacks, mine)),
            "step": self.router.step_of(trainer),
        }
        self.outbox.reply(request, Kind.PENDING, body)

    def tell_all(self, refusal: RequestError) -> None:
        """Reports an error to all trainers, in reply to their pending requests if any."""
        waiting = self.router.waiting() + self.collectives.requests()
        for request in waiting:
            self.outbox.refuse(request, refusal)
            self.router.drop(request)
        told = {request.peer for request in waiting}
        for known in self.trainers.present():
            if known.peer not in told:
                word = Message(Kind.ERROR, self.outbox.name, max(self.router.step, 0))
                self.outbox.error(known.peer, word, refusal)

    def _look_at(self, meeting: Collective, now: float) -> None:
        what, _, name = meeting.key
        absent = self.collectives.absent(meeting)
        missing = {f"trainer {number}": [f"{what} '{name}'"] for number in absent}
        passed = self.collectives.has_passed
        waits = [r for n, r in meeting.requests.items() if not passed(n, meeting)]
        late = [self._complain(request, missing, now) for request in waits]
        if any(late):
            self.collectives.drop(meeting)

    def _complain(self, request: Request, missing: dict[str, list[str]], now: float) -> bool:
        """Answers a request with an error if its peers are lost or timed out."""
        found = self._timeout(request, missing, now)
        if found is not None:
            self.outbox.refuse(request, found)
        elif missing:
            self._log(request, missing, now)
        return found is not None

    def _timeout(
        self, request: Request, missing: Mapping[str, Sequence[str]], now: float
    ) -> RequestError | None:
        """Returns the error that ends a wait, or None if it may continue."""
        options, waited = self.trainers.options, now - request.since
        for peer, things in missing.items():
            known, patience = self._peer(peer), self.trainers.patience_s()
            if peer.startswith("server"):
                patience = options.lost_after_s + options.server_return_s
            if known is not None and known.left:
                text = f"{peer} left after step {known.step}"
                return _error("peer_lost", request, things, text, waited)
            if known is not None and now - known.heard > patience:
                silent_s = now - known.heard
                text = f"{peer} is lost: silent for {silent_s:.1f} s, {known.text(now)}"
                hint = self._way_out(peer)
                return _error("peer_lost", request, things, text, waited, hint=hint)
        if missing and waited > options.step_timeout_s and not self._may_return(missing, now):
            peer, things = next(iter(missing.items()))
            text = f"{peer} never sent a hello"
            if (known := self._peer(peer)) is not None:
                text = f"{peer}: {known.text(now)}"
            elif peer.startswith("trainer") and (number := _number(peer)) in self.trainers.refused:
                text = f"{peer} was refused: {self.trainers.refused[number]}"
            return _error("timeout", request, things, text, waited)
        return None

    def _way_out(self, peer: str) -> str:
        """Returns the hint for a lost peer."""
        if peer.startswith("server"):
            return _LOOK
        if self.trainers.may_return:
            return "its log; it did not return within trainer_return_s, which the strategy sets"
        return (
            "its log; strategy.on_trainer_lost='wait' with `jaxfleet launch --trainer-restarts N` "
            "lets a trainer come back"
        )

    def _may_return(self, missing: Mapping[str, Sequence[str]], now: float) -> bool:
        """Whether a lost trainer among the missing peers may still return."""
        lost = self.trainers.lost(now) if self.trainers.may_return else ()
        return any(peer in lost for peer in missing)

    def _peer(self, name: str) -> PeerState | None:
        links, trainers = self.router.links.known, self.trainers.by_id
        return (links if name.startswith("server") else trainers).get(_number(name))

    def _log(self, request: Request, missing: dict[str, list[str]], now: float) -> None:
        """Logs a wait once per missing peer and step, whichever trainer waits."""
        if now - request.since < LOGGED_AFTER_S:
            return
        peer, things = next(iter(missing.items()))
        if (peer, request.step) in self._logged:
            return
        self._logged = {key for key in self._logged if key[1] >= request.step - 1}
        self._logged.add((peer, request.step))
        waits = [r for r in self.router.waiting() if r.step == request.step] or [request]
        names = ", ".join(dict.fromkeys(r.message.sender for r in waits[:_SHOWN]))
        missed = ", ".join(things[:_SHOWN])
        known = self._peer(peer)
        last = known.text(now) if known is not None else "it never sent a hello"
        if self._may_return({peer: things}, now):
            last = f"{last}; {self.outbox.name} {self.trainers.awaited(now)}"
        alert(
            f"{self.outbox.name}: {names} waits for {peer}: {missed} of step {request.step} "
            f"(for {now - request.since:.0f} s now; {last})"
        )


def _number(peer: str) -> int:
    return int(peer.rpartition(" ")[2])


_LOOK = "look at that process's log; step_timeout_s and lost_after_s say how long to wait"


def _error(
    code: str,
    request: Request,
    things: Sequence[str],
    text: str,
    waited: float,
    *,
    hint: str = _LOOK,
) -> RequestError:
    shown = ", ".join(things[:_SHOWN])
    if len(things) > _SHOWN:
        shown += f" and {len(things) - _SHOWN} more"
    message = request.message
    what = f"{text}; {message.sender} waited {waited:.1f} s in {message.kind.value} of step"
    what = f"{what} {message.step} for {shown}"
    return RequestError(code, what, hint=hint)
