"""A job that goes on with other servers: a launch asks for them, and trainers leave for them.

Server 0 is asked, and names the new servers in its next decision on the members of the job
(`MembershipDecisions`). Trainers do one more step, save the state, and say bye with `moves`. Such a
bye is answered only when all trainers have said it, so the first hello of the next epoch finds no
server of the old one: a server that stays has begun anew by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfleet.ps.membership import Membership, ServerMove
from jaxfleet.ps.server.outbox import Outbox, Request, RequestError
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.messages import Kind, Message

_ASKED_S = 5.0  # a request holds, unless it is repeated: whoever asked may have given up
_HINT = "ask for the servers that it has, and more after them, or fewer from the last one on"


@dataclass
class ServerMoves:
    """What a server has been asked about other servers, and the byes of trainers that move.

    Attributes:
        is_done: all trainers have moved, so this server ends, or begins anew.
        moved: the members with which it begins anew, as one of them says that had moved before this
            server was started again; None if the trainers have said bye to it.
    """

    outbox: Outbox
    trainers: TrainerRegistry
    is_done: bool = False
    moved: Membership | None = None
    _asked: ServerMove | None = None
    _asked_at: float = 0.0  # when it was repeated last
    _byes: dict[int, Request] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        """Whether trainers have said that they move: nothing is decided here any more."""
        return bool(self._byes)

    def wanted(self, now: float) -> ServerMove | None:
        """Returns the servers to which the job is to move; None without a request."""
        return self._asked if now - self._asked_at <= _ASKED_S else None

    def ask(
        self, message: Message, servers: Sequence[str], membership: Membership, now: float
    ) -> None:
        """Notes a request for other servers than the job has, unless it only asks (`peek`).

        Raises:
            RequestError: it is malformed, or another move is due.
        """
        move = ServerMove.of(message.body)
        if move is None:
            raise RequestError("bad_message", "a move names endpoints, each once, and a folder")
        if (membership.move or self.wanted(now)) not in {None, move}:
            what = "the job is about to move to other servers already"
            raise RequestError("refused", what, hint="ask again when it has")
        stay = min(len(servers), len(move.servers))
        has_others = list(move.servers[:stay]) != list(servers[:stay])
        if has_others or len(move.servers) == len(servers):
            what = f"a job with the servers {', '.join(servers)} cannot move to "
            raise RequestError("refused", what + ", ".join(move.servers), hint=_HINT)
        if message.body.get("peek") is not True:
            self._asked, self._asked_at = move, now

    def bye(self, request: Request) -> None:
        """Notes a trainer that moves; answers when all trainers do."""
        self.trainers.by_id[request.trainer].left = True
        self._byes[request.trainer] = request
        if self.trainers.all_left():
            self._end()

    def end(self, moved: Membership) -> None:
        """Ends what this server was, without the byes of trainers that have moved."""
        self.moved = moved
        self._end()

    def _end(self) -> None:
        for each in self._byes.values():
            self.outbox.reply(each, Kind.OK)
        self.is_done = True

    def look(self, now: float) -> None:
        """Goes on without trainers that are lost, if the job does; otherwise refuses the byes.

        A bye says that the state is saved, so nothing of a lost trainer is missing.
        """
        if self.is_done or not self._byes:
            return
        options = self.trainers.options
        waited_s = now - min(request.since for request in self._byes.values())
        for number in self.trainers.staying():
            is_lost = self.trainers.is_lost(number, now)
            if is_lost and options.goes_on:
                self.trainers.by_id[number].left = True
            elif is_lost or waited_s > options.step_timeout_s:
                what = f"trainer {number} did not move with the job to other servers"
                self._refuse(RequestError("peer_lost", what, hint="see its log"))
                return
        if self.trainers.all_left():
            self._end()

    def forgive(self, seconds: float, now: float) -> None:
        """Discounts waits while this process was suspended."""
        for request in self._byes.values():
            request.since = min(request.since + seconds, now)

    def _refuse(self, refusal: RequestError) -> None:
        byes, self._byes = self._byes, {}
        for request in byes.values():
            self.outbox.refuse(request, refusal)
