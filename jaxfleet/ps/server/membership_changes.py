"""Changes of a job's trainers while it runs: some are lost, leave, or join; servers may change too.

Server 0 decides on the next membership, and tells it in heartbeats; trainers tell the other
servers. From then on a server is *closing*: it runs no more blocks, answers what can be answered,
and refuses the rest, upon which trainers come again with a hello of the next epoch. When all
members of it have come, the server begins that epoch, with a program for their number and the
values and the progress that it has (docs/parameter-servers.md, "Trainers that join and leave").
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.observability.notices import alert
from jaxfleet.ps.membership import CHANGED, Membership
from jaxfleet.ps.server.collectives import CollectiveHandler
from jaxfleet.ps.server.join_candidates import JoinCandidates
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.server_links import ServerLinks
from jaxfleet.ps.server.server_moves import ServerMoves
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.ps.server.trainer_sessions import TrainerSessions
from jaxfleet.transport.messages import Kind, Message, Peer, Plain

_TOGETHER_S = 1.0  # within which trainers leave together


@dataclass
class MembershipChanges:
    """The membership of a server's job, and the change that is under way.

    Attributes:
        current: the membership whose trainers the registry has; without sessions in epoch 0.
        following: the next one, while the server is closing; None otherwise.
        on_begin: called when an epoch begins, with the hellos of its members, by number.
    """

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    collectives: CollectiveHandler
    sessions: TrainerSessions
    links: ServerLinks
    moves: ServerMoves
    current: Membership = field(default_factory=Membership)
    following: Membership | None = None
    _fixed: str = "none of its trainers has come yet"  # why the members cannot change
    _arrived: dict[int, tuple[Peer, Message]] = field(default_factory=dict)
    _candidates: JoinCandidates = field(default_factory=JoinCandidates)
    _leaving: set[str] = field(default_factory=set)
    _willing: set[str] = field(default_factory=set)  # processes that a SIGTERM lets leave
    on_begin: Callable[[Mapping[int, Message]], None] = lambda _: None
    _begun: int = 0  # the greatest step of pushes
    _rows: int = 0  # of the whole batch; 0 if unknown
    _left_at: float = 0.0  # when the last one asked to leave
    _since: float = 0.0  # when it began to close

    # --- what others ask -----------------------------------------------------------------------

    def hello(self, peer: Peer, message: Message, now: float) -> None:
        """Admits a trainer to this epoch at once, and to the next when all its members are here.

        Raises:
            RequestError: it is not a member, or as `TrainerSessions.hello`.
        """
        if self.moves.is_done:
            return  # this life is over: the next one answers when the hello is repeated
        given = Membership.of(message.body) or Membership()
        is_first = not self.trainers.facts and self.following is None
        if is_first and given.epoch >= self.current.epoch:
            self._begin_with(peer, message, given, now)
            return
        if given.epoch > self.current.epoch:
            self._arrive(peer, message, given, now)
            return
        if given.epoch < self.current.epoch:
            raise self._changed(self.current, f"{message.sender} is in none of its places any more")
        self._greet(peer, message, now)

    def _begin_with(self, peer: Peer, message: Message, given: Membership, now: float) -> None:
        """Takes the membership of the first trainer, also after a restart, unless it is refused."""
        before, count = self.current, self.trainers.options.trainers
        if self.router.is_restored and not self.router.waits:
            self._check_restored(message, given)
        self.current = given
        if given.sessions and self.trainers.restored is None:
            self.trainers.expect(len(given.sessions))  # of a server that was just added
        try:
            self._greet(peer, message, now)
        except RequestError:
            self.current = before
            if count is not None:
                self.trainers.expect(count)
            raise

    def _check_restored(self, message: Message, given: Membership) -> None:
        """Rejects other trainers than those whose steps a recovery checkpoint has."""
        known = self.sessions.me.epoch
        if given.epoch > known:
            what = f"{self.outbox.name} was started again, and its checkpoint is of other trainers"
            hint = "start the job again from its last checkpoint"
            raise RequestError("peer_lost", what, hint=hint)
        if given.epoch < known:
            what = f"{message.sender} is of trainers that the job had before"
            raise RequestError("refused", what)

    def _greet(self, peer: Peer, message: Message, now: float) -> None:
        self.sessions.hello(peer, message, now)
        fixed = message.body.get("fixed")
        self._fixed = fixed if isinstance(fixed, str) else "its trainers are of another version"
        self.router.keep_rows(keeps=self.trainers.may_return or not self._fixed)
        if message.body.get("leaves") is True:
            self._willing.add(str(message.body.get("session")))
        self._willing &= {*self._members()}  # without those that have left or were replaced

    def _arrive(self, peer: Peer, message: Message, given: Membership, now: float) -> None:
        session, number = message.body.get("session"), message.body.get("trainer")
        if not isinstance(session, str) or given.number_of(session) != number:
            raise RequestError("refused", f"{message.sender} is no member of epoch {given.epoch}")
        self.close(given, now)
        assert self.following is not None
        if given.epoch < self.following.epoch:
            raise self._changed(self.following, "the members have changed again")
        if (known := self.trainers.process(session)) is not None:
            known.heard = now
        assert isinstance(number, int)
        self._arrived[number] = peer, message

    def told(self, request: Request) -> None:
        """Takes the next membership from a trainer, which has it from server 0."""
        given = Membership.of(request.message.body)
        if given is None:
            raise RequestError("bad_message", "no membership is given")
        self.outbox.reply(request, Kind.OK)
        self.close(given, request.since)

    def leave(self, request: Request) -> None:
        """Lets a trainer leave that is between two steps; several at once leave together."""
        self._check("leave")
        known = self.trainers.by_id[request.trainer]
        others = {*self._members()} - self._leaving - {str(known.session)}
        if not others and len(self.trainers.by_id) == self.trainers.count:
            raise RequestError("refused", f"{request.message.sender} is the last trainer")
        if self._has_ended():  # no membership follows
            self.outbox.reply(request, Kind.OK, {"ends": True})
            return
        self._left_at = request.since
        self._leaving.add(str(known.session))
        self.outbox.reply(request, Kind.OK)

    def left(self, request: Request) -> None:
        """Notes the end of a trainer's script, which does not take its place in the next epoch."""
        if self.router.waits or self.following is None or self.sessions.server != 0:
            return
        self._go_on_without({str(self.trainers.by_id[request.trainer].session)}, request.since)

    def _go_on_without(self, gone: AbstractSet[str], now: float) -> None:
        """Takes trainers that have ended, or leave, out of the next membership."""
        if self.following is None:
            return
        stay = [each for each in self.following.sessions if each not in gone | self._leaving]
        if stay and len(stay) < len(self.following.sessions):
            self._announce(stay, now)

    def join(self, peer: Peer, message: Message, now: float) -> None:
        """Answers a process that is no trainer of the job and may join it.

        Raises:
            RequestError: the job's members cannot change, or not so.
        """
        self._check_addressee(message.body)
        self.outbox.answer(peer, message, Kind.OK, self._candidate(message.body, now))

    def move(self, peer: Peer, message: Message, now: float) -> None:
        """Answers a launch that asks for other servers, again and again until the job has moved.

        Raises:
            RequestError: the job's servers cannot change, or not so.
        """
        self._check_addressee(message.body)
        servers = self.sessions.servers
        is_here = message.body.get("moves_to") == servers
        if not self.trainers.facts or (is_here and self.router.step <= self.router.base):
            # No step is applied here yet, so some trainers may still read the state.
            body: dict[str, Plain] = {"waits": True}
        elif is_here:
            body = {"moved": True}
        else:
            if self.router.step < 0:
                what = "the job has not begun its first step"
                raise RequestError("refused", what, hint="try again in some seconds")
            why = f"the trainers are fixed: {self._fixed}" if self._fixed else ""
            if not self.router.waits:
                why = "its trainers do not wait for each other, so no step is that of all"
            if why:
                raise RequestError("refused", f"no server can be added or removed: {why}")
            self.router.folders.check(message)
            self.moves.ask(message, servers, self._newest, now)
            body = {"moved": False}
        self.outbox.answer(peer, message, Kind.OK, body)

    def _check_addressee(self, body: Mapping[str, Plain]) -> None:
        """Rejects a request for another job, or at another server than the one that decides."""
        job = self.trainers.facts.get("job")
        if job is not None and body.get("job") != job:
            raise RequestError("refused", f"this server is of job '{job}', not '{body.get('job')}'")
        if self.sessions.server not in {0, None}:
            raise RequestError("refused", f"{self.outbox.name} decides nothing; server 0 does")

    def _candidate(self, body: Mapping[str, Plain], now: float) -> dict[str, Plain]:
        """Notes a process that waits to join once it has the job's program."""
        session = body.get("session")
        if not isinstance(session, str) or not session:
            raise RequestError("bad_message", "a process that joins names its session")
        servers: list[Plain] = list(self.sessions.servers)
        for membership in (self.following, self.current):
            if membership is not None and membership.number_of(session) is not None:
                return {**membership.plain(), "servers": servers}
        if self.router.step < 0 and not self.current.epoch:
            return {"trainers": 0}  # not begun yet
        if self.router.step < 0 or not self.trainers.facts:
            return {"waits": True}  # started again: its trainers have not greeted it yet
        self._check("join")
        members = self._members()
        if all(self._is_lost(each, now) for each in members):
            raise RequestError(
                "refused", "all trainers of the job are lost, and its state with them"
            )
        count = self.trainers.count
        is_other = body.get("trainers") != count or body.get("servers", servers) != servers
        if is_other or self.following is not None:
            return {
                "trainers": count,
                "servers": servers,
                "rows": self._rows,
                "leaves": self._willing.issuperset(members),
                "goes_on": self.trainers.options.goes_on,
            }
        if body.get("program") != self.trainers.facts.get("program"):
            what = f"it has another program for {count} trainers than those of the job"
            raise RequestError("refused", what, hint="start it with the same script and strategy")
        self._candidates.note(session, now)
        return {"trainers": count, "waits": True}

    def beat(self, message: Message, now: float) -> None:
        """Notes a heartbeat of a process that is not in the registry yet."""
        self._candidates.beat(message.body.get("session"), now)

    def pushed(self, message: Message, now: float) -> None:
        """Lets processes join at the first push of a step: what came before it is over."""
        rows = message.body.get("rows")
        self._rows = rows if isinstance(rows, int) and rows else self._rows
        if message.step > self._begun:
            self._begun = message.step
            may_decide = self.sessions.server == 0 and self.following is None and not self._fixed
            if may_decide and self._is_level() and not self._has_ended():
                self._admit(now)

    def plain(self) -> dict[str, Plain]:
        """Returns what heartbeats tell of the membership."""
        return self._newest.plain() if self._newest.epoch else {}

    def _check(self, what: str) -> None:
        if self._fixed:
            raise RequestError("refused", f"no trainer can {what}: {self._fixed}")

    # --- the decision --------------------------------------------------------------------------

    def _is_level(self) -> bool:
        """Whether this server has applied what trainers did, also if it was started again."""
        if not self.router.waits:
            return self.router.step >= 0 and (self.current.epoch > 0 or self._have_begun())
        steps = [known.step for known in self.trainers.by_id.values()]
        return 0 <= self.router.step >= max(steps, default=0) - 1

    def _have_begun(self) -> bool:
        """Whether all of the first trainers have trained, but for those that are lost."""
        known, now = self.trainers.by_id, self.router.clock()
        begun = all(each.pushed > 0 or self.trainers.is_lost(n, now) for n, each in known.items())
        return begun and len(known) == self.trainers.count

    def _has_ended(self) -> bool:
        """Whether a trainer has left at its end; those that wait for no other have, or will."""
        return any(each.left for each in self.trainers.by_id.values())

    @property
    def _newest(self) -> Membership:
        return self.following or self.current

    def _members(self) -> tuple[str, ...]:
        """Returns the processes of the newest membership, in order."""
        if self._newest.epoch:
            return self._newest.sessions
        known = self.trainers.by_id
        return tuple(str(known[number].session) for number in sorted(known))

    def _is_lost(self, session: str, now: float) -> bool:
        known = self.trainers.process(session)
        heard = known.heard if known is not None else self._candidates.heard(session)
        return heard is None or now - heard > self.trainers.options.lost_after_s

    def _decide(self, now: float) -> None:
        """Takes processes out of the job that are lost, or want to leave."""
        members = self._members()
        lost = set()
        if self.trainers.options.goes_on and len(self.trainers.by_id) == self.trainers.count:
            lost = {session for session in members if self._is_lost(session, now)}
        stay = [session for session in members if session not in lost | self._leaving]
        if not stay or len(stay) == len(members) or not self._is_level():
            return
        if not lost and self._rows % len(stay) and now - self._left_at < _TOGETHER_S:
            return  # more may leave at this step, so that the rest can share the batch
        for session in sorted(lost):
            alert(f"{self.outbox.name}: {self._named(session, now)}; the job goes on without it")
        self._announce(stay, now)

    def _is_over(self) -> bool:
        """Whether the members change no more: a trainer has left at its end, or the job moves."""
        if self.moves.is_under_way:
            return True
        return self._has_ended() and (self.trainers.options.goes_on or not self.router.waits)

    def _note_ends(self, now: float) -> None:
        """Counts trainers as ended, too, that are lost, or leave, once another has ended.

        Where trainers wait for each other, all steps are over then.
        """
        if self.moves.is_under_way or not self._has_ended():
            return
        waits, goes_on = self.router.waits, self.trainers.options.goes_on
        gone = set()
        for number, each in self.trainers.by_id.items():
            leaves = not waits and str(each.session) in self._leaving
            if each.left or not (leaves or (goes_on and self.trainers.is_lost(number, now))):
                continue
            each.left = True
            gone.add(str(each.session))
            if not waits:
                self.router.leave(number)
            if not leaves:
                alert(f"{self.outbox.name}: trainer {number} was lost at the end: {each.doing}")
        if gone and not waits and self.sessions.server == 0:
            self._go_on_without(gone, now)

    def _named(self, session: str, now: float) -> str:
        for number, known in self.trainers.by_id.items():
            if known.session == session:
                return f"trainer {number} is lost, {known.text(now)}"
        return "a process that was joining is lost"

    def _admit(self, now: float) -> None:
        """Lets candidates join that can have an equal part of the batch; or has the job move."""
        members, asked = self._members(), self.moves.wanted(now)
        here = [s for s in self._candidates if not self._is_lost(s, now)]
        count = self._divisor(len(members) + len(here))
        if count > len(members):
            self._announce([*members, *here[: count - len(members)]], now)
        elif asked is not None and self.current.move is None:
            self.close(Membership(self.current.epoch + 1, members, move=asked), now)

    def _divisor(self, most: int) -> int:
        """Returns the greatest number of trainers that can share the batch."""
        return next((n for n in range(most, 1, -1) if self._rows % n == 0), 1)

    def _announce(self, sessions: Sequence[str], now: float) -> None:
        """Decides; those that cannot have an equal part of the batch leave."""
        newest = self._newest
        stay = tuple(sessions[: self._divisor(len(sessions))])
        known = {str(each.session) for each in self.trainers.by_id.values()}
        before = self.following.dismissed if self.following is not None else ()
        gone = sorted({*before, *sessions, *self._leaving} & known - {*stay})
        move = newest.move or self.moves.wanted(now)
        self.close(Membership(newest.epoch + 1, stay, tuple(gone), move), now)

    # --- the change ----------------------------------------------------------------------------

    def close(self, membership: Membership, now: float) -> None:
        """Ends the current epoch: what cannot be answered any more is refused."""
        is_old = membership.epoch <= self._newest.epoch
        if is_old or not membership.sessions or self.moves.is_done:
            return
        self.following, self._since = membership, now
        self._send_back(self._changed(membership, "the members change again"))
        if not self.router.waits:
            # With the values for which a trainer has waited, lest it goes on with older ones.
            self.outbox.news = membership.plain()
        self.router.close_epoch()

    def _send_back(self, refusal: RequestError) -> None:
        """Refuses the hellos of the next epoch that have arrived."""
        arrived, self._arrived = self._arrived, {}
        for peer, message in arrived.values():
            self.outbox.error(peer, message, refusal)

    def _changed(self, membership: Membership, why: str) -> RequestError:
        return RequestError(
            CHANGED, f"the trainers of the job change: {why}", more=membership.plain()
        )

    def look(self, now: float) -> None:
        """Decides about lost trainers, and ends a change that cannot be completed."""
        patience = self.trainers.options.lost_after_s
        self._candidates.forget_silent(now - 3 * patience)
        self._note_ends(now)
        if not self._is_over() and self.sessions.server == 0 and not self._fixed:
            self._decide(now)
        if self.following is not None:
            self._look_at_closing(now)

    def _look_at_closing(self, now: float) -> None:
        assert self.following is not None
        options = self.trainers.options
        absent = [n for n in range(len(self.following.sessions)) if n not in self._arrived]
        limit_s = options.step_timeout_s
        if not options.goes_on:
            limit_s = max(limit_s, options.lost_after_s)
        for number in absent:
            session = self.following.sessions[number]
            known = self.trainers.process(session)
            silent = known is not None and now - known.heard > options.lost_after_s
            if (silent and not options.goes_on) or now - self._since > limit_s:
                what = f"trainer {number} of {len(self.following.sessions)} did not come when the "
                self._send_back(RequestError("peer_lost", f"{what}trainers of the job changed"))
                return

    def advance(self, now: float, *, is_idle: bool) -> None:
        """Refuses what cannot be answered; begins the next epoch when all its members are here."""
        if self.following is None or not is_idle:
            return
        self._refuse_rest(self.following)
        is_complete = len(self._arrived) == len(self.following.sessions)
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

    def _begin(self, now: float) -> None:
        """Begins the next epoch."""
        assert self.following is not None
        before, members = self.trainers.count, len(self.following.sessions)
        self.current, self.following = self.following, None
        self.sessions.me.epoch = self.current.epoch
        arrived, self._arrived = self._arrived, {}
        numbers = {known.session: number for number, known in self.trainers.by_id.items()}
        former = {n: numbers.get(session) for n, session in enumerate(self.current.sessions)}
        self.outbox.news = {}
        self._leaving -= {*self.current.sessions}
        self._begun = self.router.step
        self._candidates.forget(self.current.sessions)
        self.trainers.begin_epoch(members)
        self.collectives.forget_strangers()
        self.on_begin({number: message for number, (_, message) in arrived.items()})
        self.router.begin_epoch(former)
        for number in sorted(arrived):
            peer, message = arrived[number]
            try:
                self.hello(peer, message, now)
            except RequestError as refusal:
                self.outbox.error(peer, message, refusal)
        self.links.renew(self.sessions.me.program)
        what = f"from step {self.router.step + 1} on, {members} trainers instead of {before}"
        if not self.router.waits:
            what = f"the job has {members} trainer{'s' * (members != 1)} now instead of {before}"
        if members == before and (move := self.current.move) is not None:
            # Its own step is of no use: it may have run the one that is done again.
            what = f"the job moves to other servers after this step, {len(move.servers)} in all"
        alert(f"{self.outbox.name}: {what}")


def _is_own(message: Message) -> bool:
    """Whether a trainer's request waits for no operation of the others."""
    is_save = message.kind is Kind.SAVE and message.body.get("path") is None
    return is_save or message.kind in {Kind.PULL, Kind.LOOK_UP}
