"""Changes of a job's trainers while it runs: some are lost, leave, or join; servers may change too.

Server 0 decides on the next membership, and tells it in heartbeats; trainers tell the other
servers. From then on a server is *closing*: it runs no more blocks, once it has what trainers have
done (`EpochEnd`), answers what can be answered, and refuses the rest, upon which trainers come
again with a hello of the next epoch. When all members of it have come, the server begins that
epoch, with a program for their number and the values and the progress that it has
(docs/parameter-servers.md, "Trainers that join and leave").
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxfleet.observability.notices import alert
from jaxfleet.ps.membership import CHANGED, Membership
from jaxfleet.ps.server.collectives import CollectiveHandler
from jaxfleet.ps.server.epoch_end import EpochEnd
from jaxfleet.ps.server.members import Members
from jaxfleet.ps.server.membership_decisions import MembershipDecisions
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.server_links import ServerLinks
from jaxfleet.ps.server.server_moves import ServerMoves
from jaxfleet.ps.server.trainer_registry import TrainerRegistry, trainer_number
from jaxfleet.ps.server.trainer_sessions import TrainerSessions
from jaxfleet.transport.messages import Kind, Message, Peer

Hellos = Mapping[int, Message]  # of an epoch's members, by number
Former = Mapping[int, int | None]  # the number that each of them had before; None if it is new


@dataclass
class MembershipChanges:
    """The membership of a server's job, and the change that is under way.

    Attributes:
        on_begin: called when an epoch begins, with the hellos of its members, their former
            numbers, and whether this server was started again in the epoch before.
    """

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    collectives: CollectiveHandler
    sessions: TrainerSessions
    links: ServerLinks
    moves: ServerMoves
    members: Members
    _arrived: dict[int, tuple[Peer, Message]] = field(default_factory=dict)
    on_begin: Callable[[Hellos, Former, bool], None] = lambda _hellos, _former, _again: None
    decisions: MembershipDecisions = field(init=False)
    _end: EpochEnd = field(init=False)
    _awaiting: dict[int, tuple[Peer, Message]] | None = None  # hellos until there is a program
    _since: float = 0.0  # when it began to close
    _begins_again: bool = False  # an epoch that has begun elsewhere

    def __post_init__(self) -> None:
        self._end = EpochEnd(self.outbox, self.trainers, self.router, self.collectives)
        self.decisions = MembershipDecisions(
            self.outbox,
            self.trainers,
            self.router,
            self.sessions,
            self.moves,
            self.members,
            self.close,
            lambda: self._end.restored is not None,
        )

    def restored(self) -> None:
        """Goes on in the epoch of a recovery checkpoint."""
        self._end.restored = self.sessions.me.epoch
        self.members.current = Membership(self.sessions.me.epoch)

    def hello(self, peer: Peer, message: Message, now: float) -> None:
        """Admits a trainer to this epoch at once, and to the next when all its members are here.

        Raises:
            RequestError: it is not a member, or as `TrainerSessions.hello`.
        """
        if self.moves.is_done:
            return  # this life is over: the next one answers when the hello is repeated
        given = Membership.of(message.body) or Membership()
        current = self.members.current
        if not self.trainers.facts and self._may_begin(given):
            self._begin_with(peer, message, given, now)
            return
        if given.epoch > current.epoch and self._has_moved(message, given):
            self.moves.end(given)
            return
        if given.epoch > current.epoch:
            if self._is_in_turn(given, has_begun=message.body.get("has_begun") is True):
                self._arrive(peer, message, given, now)
            return
        if given.epoch < current.epoch and not current.sessions:
            what = f"{message.sender} is of trainers that the job had before"
            raise RequestError("refused", what)
        if given.epoch < current.epoch:
            why = f"{message.sender} is in none of its places any more"
            raise self._changed(current, why, has_begun=True)
        number = trainer_number(message)
        if self._awaiting is not None and number in range(1, len(current.sessions)):
            self._awaiting[number] = peer, message
            return
        self._greet(peer, message, now)

    def _may_begin(self, given: Membership) -> bool:
        """Whether a server without trainers may take those of an epoch as they are."""
        if self.members.following is not None:
            return False
        if (restored := self._end.restored) is None:
            return given.epoch >= self.members.current.epoch
        # Later members come after a change that it missed; new ones, when all begins again.
        return given.epoch == restored or (self.router.waits and given.epoch == 0)

    def _has_moved(self, message: Message, given: Membership) -> bool:
        """Whether a hello shows that all trainers have left this server, as it was, for others.

        It has not heard their byes, since it was started again, or was suspended.
        """
        body, current = message.body, self.members.current
        session, job = (
            body.get("session"),
            self.trainers.facts.get("job", self.trainers.options.job),
        )
        is_member = isinstance(session, str) and given.number_of(session) == body.get("trainer")
        if body.get("has_moved") is not True or not is_member or job not in {None, body.get("job")}:
            return False
        if self._end.restored is not None:
            return True
        return current.move is not None and given == current.moved()

    def _is_in_turn(self, given: Membership, *, has_begun: bool) -> bool:
        """Whether a hello is of the next epoch that begins here.

        A server that was started again may have missed several, and begins the earliest that has
        begun elsewhere. The hellos of later ones are repeated.
        """
        if self._end.restored is None:
            return True
        following = self.members.following
        if has_begun and (following is None or given.epoch <= following.epoch):
            if following is not None and given.epoch < following.epoch:
                self.members.following, self._arrived = None, {}
            self._begins_again = True
        return not self._begins_again or following is None or given.epoch <= following.epoch

    def _begin_with(self, peer: Peer, message: Message, given: Membership, now: float) -> None:
        """Takes the membership of the first trainer, also after a restart, unless it is refused."""
        before, count = self.members.current, self.trainers.options.trainers
        self.members.current = given
        if given.sessions and self.trainers.restored is None:
            self.trainers.expect(len(given.sessions))  # of a server that was just added
        try:
            self._greet(peer, message, now)
        except RequestError:
            self.members.current = before
            if count is not None:
                self.trainers.expect(count)
            raise
        self.sessions.me.epoch = given.epoch
        if self._end.restored is not None:
            self._end.restored = given.epoch
        elif message.body.get("has_moved") is True:
            self.members.moved_at = now

    def _greet(self, peer: Peer, message: Message, now: float) -> None:
        self.sessions.hello(peer, message, now)
        self.members.note_hello(message)
        self.router.keep_rows(keeps=self.trainers.may_return or not self.members.fixed)

    def _arrive(self, peer: Peer, message: Message, given: Membership, now: float) -> None:
        session, number = message.body.get("session"), message.body.get("trainer")
        if not isinstance(session, str) or given.number_of(session) != number:
            raise RequestError("refused", f"{message.sender} is no member of epoch {given.epoch}")
        self._end.check_level(message)
        self.close(given, now)
        assert self.members.following is not None
        if given.epoch < self.members.following.epoch:
            raise self._changed(self.members.following, "the members have changed again")
        if (known := self.trainers.process(session)) is not None:
            known.heard = now
        assert isinstance(number, int)
        self._arrived[number] = peer, message

    def told(self, request: Request) -> None:
        """Takes the next membership from a trainer, which has it from server 0.

        A trainer that `ends` its epoch is answered when it may leave its place.
        """
        given = Membership.of(request.message.body)
        if given is None:
            raise RequestError("bad_message", "no membership is given")
        is_next = given.epoch > self.members.current.epoch
        if is_next and request.message.body.get("ends") is True:
            self._end.note(request)
        else:
            self.outbox.reply(request, Kind.OK)
        self.close(given, request.since)

    def beat(self, message: Message, now: float) -> None:
        """Notes a heartbeat of a process that is not in the registry yet."""
        self.members.candidates.beat(message.body.get("session"), now)

    def close(self, membership: Membership, now: float) -> None:
        """Ends the current epoch: what cannot be answered any more is refused."""
        is_old = membership.epoch <= self.members.newest.epoch
        if is_old or not membership.sessions or self.moves.is_done:
            return
        self.members.following, self._since = membership, now
        self._send_back(self._changed(membership, "the members change again"))
        if not self.router.waits:
            # With the values for which a trainer has waited, lest it goes on with older ones.
            self.outbox.news = membership.plain()
        self._end.close(membership.sessions, self._last_steps(), now)

    def _last_steps(self) -> dict[str, int]:
        """Returns the last steps that members did in this epoch who have come to the next one."""
        found = {}
        for _, message in self._arrived.values():
            session, done = message.body.get("session"), message.body.get("done")
            found[str(session)] = done if isinstance(done, int) else -1  # it joins
        return found

    def _send_back(self, refusal: RequestError) -> None:
        """Refuses the hellos of the next epoch that have arrived."""
        arrived, self._arrived = {**(self._awaiting or {}), **self._arrived}, {}
        if self._awaiting is not None:
            self._awaiting = {}
        for peer, message in arrived.values():
            self.outbox.error(peer, message, refusal)

    def _changed(
        self, membership: Membership, why: str, *, has_begun: bool = False
    ) -> RequestError:
        more = {**membership.plain(), "has_begun": True} if has_begun else membership.plain()
        return RequestError(CHANGED, f"the trainers of the job change: {why}", more=more)

    def forgive(self, seconds: float, now: float) -> None:
        """Discounts silence and waits while this process was suspended."""
        self._since = min(self._since + seconds, now)
        self.members.forgive(seconds, now)
        self._end.forgive(seconds, now)

    def look(self, now: float) -> None:
        """Decides about lost trainers, and ends a change that cannot be completed."""
        patience = self.trainers.options.lost_after_s
        self.members.candidates.forget_silent(now - 3 * patience)
        self.decisions.look(now)
        if (following := self.members.following) is not None:
            self._look_at_closing(following, now)

    def _look_at_closing(self, following: Membership, now: float) -> None:
        options, count = self.trainers.options, len(following.sessions)
        limit_s = options.step_timeout_s
        if not options.goes_on:
            limit_s = max(limit_s, options.lost_after_s)
        for number in (n for n in range(count) if n not in self._arrived):
            known = self.trainers.process(following.sessions[number])
            silent = known is not None and now - known.heard > options.lost_after_s
            if (silent and not options.goes_on) or now - self._since > limit_s:
                what = f"trainer {number} of {count} did not come when the trainers of the job"
                self._send_back(RequestError("peer_lost", f"{what} changed"))
                return

    def advance(self, now: float, *, is_idle: bool) -> None:
        """Refuses what cannot be answered; begins the next epoch when all its members are here."""
        if (following := self.members.following) is None or not is_idle:
            return
        self._end.close(following.sessions, self._last_steps(), now)
        if not self._end.is_closed:
            return
        self._refuse_rest(following)
        is_saved = self._end.settle()
        is_complete = is_saved and len(self._arrived) == len(following.sessions)
        if is_complete and (self.router.waits or self.router.is_drained):
            self._begin(now)

    def _refuse_rest(self, membership: Membership) -> None:
        """Refuses what cannot be answered any more.

        Where trainers do not wait for each other, that is what they do together between two steps.
        """
        refusal = self._changed(membership, "begin this operation again")
        for request in self.router.waiting():
            if self.router.waits or not _is_own(request.message):
                self.outbox.refuse(request, refusal)
                self.router.drop(request)
        for meeting in self.collectives.waiting():
            for request in meeting.requests.values():
                self.outbox.refuse(request, refusal)
            self.collectives.drop(meeting)

    def defined(self) -> None:
        """Greets those that wait for the program of the epoch, which is here."""
        if self._awaiting is not None and not self.router.awaits_program:
            awaiting, self._awaiting = self._awaiting, None
            self._greet_all(awaiting, self.router.clock())

    def _greet_all(self, hellos: Mapping[int, tuple[Peer, Message]], now: float) -> None:
        for number in sorted(hellos):
            peer, message = hellos[number]
            try:
                self.hello(peer, message, now)
            except RequestError as refusal:
                self.outbox.error(peer, message, refusal)

    def _former(self, message: Message, *, again: bool) -> int | None:
        """Returns the number that a trainer had in the epoch that ends; None if it is new."""
        session = message.body.get("session")
        for number, known in self.trainers.by_id.items():
            if known.session == session:
                return number
        return self._end.former(message) if again else None

    def _begin(self, now: float) -> None:
        """Begins the next epoch."""
        assert self.members.following is not None
        before, members = self.trainers.count, len(self.members.following.sessions)
        self.members.current, self.members.following = self.members.following, None
        self.sessions.me.epoch = self.members.current.epoch
        if self.router.step >= 0:
            self.members.moved_at = None
        elif self.members.moved_at is not None:
            self.members.moved_at = now
        arrived, self._arrived = self._arrived, {}
        hellos = {number: message for number, (_, message) in arrived.items()}
        was_restored = self._end.restored is not None
        former = {n: self._former(message, again=was_restored) for n, message in hellos.items()}
        self.outbox.news = {}
        self.decisions.begin_epoch()
        self.members.candidates.forget(self.members.current.sessions)
        self._end.begin(self.members.current.epoch, is_behind=self._begins_again)
        self.trainers.begin_epoch(members)
        self.collectives.forget_strangers()
        self.on_begin(hellos, former, was_restored)
        self.router.begin_epoch(former)
        # What they send in this epoch must not come before its program. They may have begun it
        # when this server was killed, and then wait for none of them.
        self._awaiting, self._begins_again = {} if was_restored else None, False
        self._greet_all(arrived, now)
        self.links.renew(self.sessions.me.program)
        count = f"{members} trainer{'s' * (members != 1)}"
        what = f"from step {self.router.step + 1} on, {count} instead of {before}"
        if not self.router.waits:
            what = f"the job has {count} now instead of {before}"
        if members == before and (move := self.members.current.move) is not None:
            # Its own step is of no use: it may have run the one that is done again.
            what = f"the job moves to other servers after this step, {len(move.servers)} in all"
        alert(f"{self.outbox.name}: {what}")


def _is_own(message: Message) -> bool:
    """Whether a trainer's request waits for no operation of the others."""
    is_save = message.kind is Kind.SAVE and message.body.get("path") is None
    return is_save or message.kind in {Kind.PULL, Kind.LOOK_UP}
