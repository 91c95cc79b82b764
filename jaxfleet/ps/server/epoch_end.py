"""The end of an epoch on one server, whose trainers give place to others.

Where trainers wait for each other, no block runs any more once the epoch is closed, and a recovery
checkpoint has all that they have done before any of them leaves its place: only in that place can
it send it again. So a server that is killed from then on goes on from this checkpoint, and opens
the next epoch again (docs/parameter-servers.md, "Trainers that join and leave").

A server that was started again while its trainers end the epoch first gets level with them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jaxfleet.ps.server.collectives import CollectiveHandler
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError, is_new
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Kind, Message

_AGAIN = "start the job again from its last checkpoint"


@dataclass
class EpochEnd:
    """Closes an epoch, and keeps what its trainers have done.

    Attributes:
        restored: the epoch in which this server, which was started again, may lack what trainers
            have done; None if there is none.
        is_closed: no block runs any more, or no trainer waits for another.
    """

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    collectives: CollectiveHandler
    restored: int | None = None
    is_closed: bool = False
    _done: dict[str, int] = field(default_factory=dict)  # by session, of those that have ended
    _requests: list[Request] = field(default_factory=list)
    _lacks_since: float | None = None

    def note(self, request: Request) -> None:
        """Answers a trainer that has ended its epoch once a checkpoint has its steps."""
        known = self.trainers.by_id[request.trainer]
        self._done[str(known.session)] = request.step
        if is_new(request, self._requests):
            self._requests.append(request)

    def close(self, sessions: Collection[str], arrived: Mapping[str, int], now: float) -> None:
        """Closes the epoch, unless this server was started again and may lack steps.

        Args:
            sessions: the members of the next epoch.
            arrived: those that have come to it, with the last step of each in this one.
            now: the time.
        """
        if self.is_closed:
            return
        if self.restored is None or not self.router.waits:
            self.is_closed = True
        else:
            self._get_level(sessions, {**self._done, **arrived}, now)
        if self.is_closed:
            self.router.close_epoch()

    def _get_level(self, sessions: Collection[str], done: Mapping[str, int], now: float) -> None:
        """Closes the epoch once the steps are here that trainers have done.

        A step is complete on all trainers or on none, and this server may have sent its part of one
        before it was killed. So each member has ended the epoch, after sending all again, or waits
        for what no member sends any more.
        """
        stuck = self._stuck(sessions, done)
        if not all(each in done or each in stuck for each in sessions):
            self._lacks_since = None
            return
        last = max((*done.values(), *stuck.values()), default=-1)
        if self.router.step >= last:
            self.is_closed = True
        elif self._lacks_since is None:
            self._lacks_since = now
        elif now - self._lacks_since > self.trainers.options.lost_after_s:
            self._give_up(last)

    def _stuck(self, sessions: Collection[str], done: Mapping[str, int]) -> dict[str, int]:
        """Returns the trainers with a request that lacks what comes from none of the members.

        With the last step that each has done at least.
        """
        found: dict[str, int] = {}
        for request in self.router.waiting():
            if any(self._is_gone(who, sessions, done) for who in self.router.missing(request)):
                found[self._session(request.trainer)] = request.step - 1
        for meeting in self.collectives.waiting():
            absent = [f"trainer {number}" for number in self.collectives.absent(meeting)]
            if any(self._is_gone(who, sessions, done) for who in absent):
                for number, request in meeting.requests.items():
                    if not self.collectives.has_passed(number, meeting):
                        found[self._session(number)] = request.step - 1
        return found

    def _is_gone(self, who: str, sessions: Collection[str], done: Mapping[str, int]) -> bool:
        """Whether a peer is a trainer that sends nothing more in this epoch."""
        kind, _, number = who.partition(" ")
        session = self._session(int(number)) if kind == "trainer" else ""
        return kind == "trainer" and (session not in sessions or session in done)

    def _give_up(self, done: int) -> None:
        """Tells trainers that only one which is gone could send what this server lacks."""
        lacks = self._lacks(done)
        for request in self._requests:
            self.outbox.refuse(request, lacks)
        for request in self.router.waiting():
            self.outbox.refuse(request, lacks)
            self.router.drop(request)
        self._requests.clear()

    def _lacks(self, done: int) -> RequestError:
        what = (
            f"{self.outbox.name} was started again when the trainers changed, from step "
            f"{self.router.step}, and one that is gone has the only gradients up to step {done}"
        )
        return RequestError("peer_lost", what, hint=_AGAIN)

    def _session(self, trainer: int) -> str:
        known = self.trainers.by_id.get(trainer)
        return "" if known is None else str(known.session)

    def forgive(self, seconds: float, now: float) -> None:
        """Discounts the time while this process was suspended."""
        if self._lacks_since is not None:
            self._lacks_since = min(self._lacks_since + seconds, now)

    def settle(self) -> bool:
        """Returns whether what trainers have done is saved; answers those that have ended then.

        Trainers that do not wait for each other have it saved before they leave their places.
        """
        if self.router.waits and not self.router.save_end():
            return False
        requests, self._requests = self._requests, []
        for request in requests:
            self.outbox.reply(request, Kind.OK)
        return True

    def check_level(self, message: Message) -> None:
        """Rejects a member of the next epoch if this server lacks what it has done before.

        Raises:
            RequestError: the server was started again, from an earlier checkpoint.
        """
        done = message.body.get("done")
        if self.restored is None or not self.router.takes_pushes or not isinstance(done, int):
            return  # it has none, or was no trainer before
        former = 0 if self.router.waits else self.former(message)  # steps may be those of all
        if former is None or self.router.step_of(former) < done:
            raise self._lacks(done)

    def former(self, message: Message) -> int | None:
        """Returns the number that the sender of a hello had before, as it says; None without one.

        A number that no trainer had counts as none, as does one of another epoch than that from
        which this server was started again.
        """
        number, epoch = message.body.get("former"), message.body.get("former_epoch")
        held = self.router.held
        had = range(held.plan.trainers) if held is not None else range(0)
        if not isinstance(number, int) or number not in had or epoch != self.restored:
            return None
        return number

    def begin(self, epoch: int, *, is_behind: bool) -> None:
        """Begins the next epoch; `is_behind` if its trainers have gone on in it before."""
        self.restored = epoch if is_behind else None
        self.is_closed, self._lacks_since = False, None
        self._done.clear()
        self._requests.clear()
