"""Requests of other processes than trainers: to join a job, or to move it to other servers."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.ps.server.members import Members
from jaxfleet.ps.server.outbox import Outbox, RequestError
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.server_moves import ServerMoves
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.ps.server.trainer_sessions import TrainerSessions
from jaxfleet.transport.messages import Kind, Message, Peer, Plain


@dataclass
class MembershipRequests:
    """Answers those that want a change, which `MembershipChanges` makes at the next step."""

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    sessions: TrainerSessions
    moves: ServerMoves
    members: Members

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
            why = f"the trainers are fixed: {self.members.fixed}" if self.members.fixed else ""
            if not self.router.waits:
                why = "its trainers do not wait for each other, so no step is that of all"
            if why:
                raise RequestError("refused", f"no server can be added or removed: {why}")
            self.router.folders.check(message)
            self.moves.ask(message, servers, self.members.newest, now)
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
        for membership in (self.members.following, self.members.current):
            if membership is not None and membership.number_of(session) is not None:
                # None of its trainers may have greeted a server that was started again.
                return {**membership.plain(), **({"servers": servers} if servers else {})}
        if self.router.step < 0 and not self.members.current.epoch:
            return {"trainers": 0}  # not begun yet
        if self.router.step < 0 or not self.trainers.facts:
            return {"waits": True}  # started again: its trainers have not greeted it yet
        self.members.check_change("join")
        members = self.members.sessions()
        if all(self.members.is_lost(each, now) for each in members):
            if any(self.members.heard(each) is None for each in members):
                return {"waits": True}  # started again: some may still come
            raise RequestError(
                "refused", "all trainers of the job are lost, and its state with them"
            )
        count = self.trainers.count
        is_other = body.get("trainers") != count or body.get("servers", servers) != servers
        if is_other or self.members.following is not None:
            return {
                "trainers": count,
                "servers": servers,
                "rows": self.members.rows,
                "leaves": self.members.willing.issuperset(members),
                "goes_on": self.trainers.options.goes_on,
            }
        if body.get("program") != self.trainers.facts.get("program"):
            what = f"it has another program for {count} trainers than those of the job"
            raise RequestError("refused", what, hint="start it with the same script and strategy")
        self.members.candidates.note(session, now)
        return {"trainers": count, "waits": True}
