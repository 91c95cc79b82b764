"""Server 0's decisions on the next members of a job.

A trainer that is lost, or leaves, is taken out at the next look. Processes join, and the job moves
to other servers, at the first push of a step, when all that trainers do between steps is over.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jaxfleet.observability.notices import alert
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.server.members import Members
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.server_moves import ServerMoves
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.ps.server.trainer_sessions import TrainerSessions
from jaxfleet.transport.messages import Kind, Message

_TOGETHER_S = 1.0  # within which trainers leave together
_MOST_LATE = 3  # times `lost_after_s` that trainers take to come to other servers


@dataclass
class MembershipDecisions:
    """Decides on the next members, and passes them to `announce`.

    Attributes:
        announce: takes the next membership, and the time.
        may_be_told: whether this server, before it was started again, may have told some of another
            decision.
    """

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    sessions: TrainerSessions
    moves: ServerMoves
    members: Members
    announce: Callable[[Membership, float], None]
    may_be_told: Callable[[], bool]
    _leaving: dict[str, Request | None] = field(default_factory=dict)  # by session; if unanswered
    _begun: int = 0  # the greatest step of pushes
    _left_at: float = 0.0  # when the last one asked to leave

    def begin_epoch(self) -> None:
        """Takes the members of a new epoch, and lets those go that have left."""
        leaving, self._leaving = self._leaving, {}
        for session, request in leaving.items():
            if request is not None and session not in self.members.current.sessions:
                self.outbox.reply(request, Kind.OK)  # otherwise it asks again
        self._begun = self.router.step

    def look(self, now: float) -> None:
        """Decides about trainers that are lost, or leave."""
        self._note_ends(now)
        if self._has_ended():
            self._let_end()
        if not self._is_over() and self.sessions.server == 0 and not self.members.fixed:
            self._decide(now)

    def leave(self, request: Request) -> None:
        """Lets a trainer leave that is between two steps; several at once leave together.

        It is answered when the others have come to the next epoch: until then a server that is
        started again hears of it only from itself.
        """
        self.members.check_change("leave")
        known = self.trainers.by_id[request.trainer]
        others = {*self.members.sessions()} - {*self._leaving, str(known.session)}
        if not others and len(self.trainers.by_id) == self.trainers.count:
            raise RequestError("refused", f"{request.message.sender} is the last trainer")
        if self._has_ended():  # no membership follows
            self.outbox.reply(request, Kind.OK, {"ends": True})
            return
        self._left_at = request.since
        self._leaving[str(known.session)] = request

    def _let_end(self) -> None:
        """Lets trainers that leave end like the one that has: no membership may follow."""
        for session, request in self._leaving.items():
            if request is not None:
                self.outbox.reply(request, Kind.OK, {"ends": True})
                self._leaving[session] = None

    def left(self, request: Request) -> None:
        """Notes the end of a trainer's script, which does not take its place in the next epoch."""
        if self.router.waits or self.members.following is None or self.sessions.server != 0:
            return
        self._go_on_without({str(self.trainers.by_id[request.trainer].session)}, request.since)

    def _go_on_without(self, gone: AbstractSet[str], now: float) -> None:
        """Takes trainers that have ended, or leave, out of the next membership."""
        if (following := self.members.following) is None:
            return
        stay = [each for each in following.sessions if each not in {*gone, *self._leaving}]
        if stay and len(stay) < len(following.sessions):
            self._announce(stay, now)

    def pushed(self, message: Message, now: float) -> None:
        """Lets processes join at the first push of a step: what came before it is over."""
        rows = message.body.get("rows")
        self.members.rows = rows if isinstance(rows, int) and rows else self.members.rows
        if message.step > self._begun:
            self._begun = message.step
            is_open = self.members.following is None and not self.members.fixed
            if self.sessions.server == 0 and is_open and self._is_level() and not self._has_ended():
                self._admit(now)

    def _is_level(self) -> bool:
        """Whether this server has applied what trainers did, also if it was started again."""
        if not self.router.waits:
            has_changed = self.members.newest.epoch > 0
            return self.router.step >= 0 and (has_changed or self._have_begun())
        if self.router.step < 0 and self.members.moved_at is not None:
            return True  # its state is still on disk, from where trainers load it
        if not self.members.newest.sessions and len(self.trainers.by_id) < self.trainers.count:
            return False  # some of the first trainers have not greeted it
        steps = [known.step for known in self.trainers.by_id.values()]
        return 0 <= self.router.step >= max(steps, default=0) - 1

    def _have_begun(self) -> bool:
        """Whether all of the first trainers have trained, but for those that are lost."""
        known, now = self.trainers.by_id, self.router.clock()
        base, step_of = self.router.base, self.router.step_of
        begun = all(
            each.pushed > 0 or step_of(n) > base or self.trainers.is_lost(n, now)
            for n, each in known.items()
        )
        return begun and len(known) == self.trainers.count

    def _has_ended(self) -> bool:
        """Whether a trainer has left at its end; those that wait for no other have, or will."""
        return any(each.left for each in self.trainers.by_id.values())

    def _decide(self, now: float) -> None:
        """Takes processes out of the job that are lost, or want to leave."""
        members = self.members.sessions()
        lost = set()
        if self.trainers.options.goes_on and self._is_complete(now):
            lost = {session for session in members if self.members.is_lost(session, now)}
        stay = [session for session in members if session not in {*lost, *self._leaving}]
        if not stay or len(stay) == len(members) or not self._is_level():
            return
        if not lost and self.members.rows % len(stay) and now - self._left_at < _TOGETHER_S:
            return  # more may leave at this step, so that the rest can share the batch
        for session in sorted(lost):
            lost_one = self.members.named(session, now)
            alert(f"{self.outbox.name}: {lost_one}; the job goes on without it")
        self._announce(stay, now)

    def _is_complete(self, now: float) -> bool:
        """Whether all members have come; to servers to which the job has moved, or are late."""
        if len(self.trainers.by_id) == self.trainers.count:
            return True
        since, patience_s = self.members.moved_at, self.trainers.options.lost_after_s
        return since is not None and now - since > _MOST_LATE * patience_s

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

    def _admit(self, now: float) -> None:
        """Lets candidates join that can have an equal part of the batch; or has the job move.

        Where the job moves after this step, they join it at the servers to which it has moved.
        """
        if self.members.current.move is not None:
            return
        members, asked = self.members.sessions(), self.moves.wanted(now)
        here = [s for s in self.members.candidates if not self.members.is_lost(s, now)]
        count = self.members.divisor(len(members) + len(here))
        if count > len(members):
            self._announce([*members, *here[: count - len(members)]], now)
        elif asked is not None:
            self.announce(Membership(self._next_epoch(), members, move=asked), now)

    def _announce(self, sessions: Sequence[str], now: float) -> None:
        """Decides; those that cannot have an equal part of the batch leave."""
        newest = self.members.newest
        stay = tuple(sessions[: self.members.divisor(len(sessions))])
        known = {str(each.session) for each in self.trainers.by_id.values()}
        before = self.members.following.dismissed if self.members.following is not None else ()
        gone = sorted({*before, *sessions, *self._leaving} & known - {*stay})
        move = newest.move or self.moves.wanted(now)
        self.announce(Membership(self._next_epoch(), stay, tuple(gone), move), now)

    def _next_epoch(self) -> int:
        """Returns the number of the membership after the newest.

        Before it was started again, this server may have told some of another one.
        """
        may_be_told = self.members.following is None and self.may_be_told()
        return self.members.newest.epoch + 1 + may_be_told
