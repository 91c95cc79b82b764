"""What servers tell a trainer of the next members of its job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.request_sender import RequestSender
from jaxfleet.ps.membership import Membership, MembershipChangedError
from jaxfleet.transport.messages import Kind, Message, Plain

_TOLD = 2  # of members without this trainer: by a heartbeat, and when they have begun


@dataclass
class MembershipWatch:
    """Takes the next members of a job from server 0, and tells the other servers of them.

    Attributes:
        following: other members than those of now, among which to take a place; None without any.
    """

    sender: RequestSender
    following: Membership | None = None
    _told: int = field(init=False)  # the newest epoch that servers were told
    _ends: bool = False  # this trainer does nothing more in its place

    def __post_init__(self) -> None:
        self._told = self.sender.me.membership.epoch

    def note(self, told: Membership | None) -> None:
        """Takes the members with which a server refuses a request."""
        if told is not None and (self.following is None or told.epoch > self.following.epoch):
            self.following = told

    def look(self, newest: Membership | None) -> None:
        """Tells all servers when server 0 has decided on other members of the job.

        They then refuse what they cannot answer any more: an operation of this trainer ends only
        if it cannot end well on any other.

        Raises:
            MembershipChangedError: this trainer is none of them, or only about to take a place.
        """
        if newest is None or newest.epoch <= self._told:
            return
        self._told = newest.epoch
        self.following = newest
        me, servers = self.sender.me, self.sender.servers
        is_member = self._is_among(newest)
        if not all(known.is_open for known in servers) or (me.is_sync and not is_member):
            raise MembershipChangedError(newest)
        for server in range(len(servers)):
            self._tell(server, newest)

    def tell_again(self, server: int) -> None:
        """Tells a server that was started again of the members to come."""
        following = self.following
        if following is not None and following.epoch > self.sender.me.membership.epoch:
            self._tell(server, following)

    def _tell(self, server: int, members: Membership) -> PendingRequest:
        ends: dict[str, Plain] = {"ends": True} if self._ends else {}
        return self.sender.request(server, Kind.MEMBERS, body={**members.plain(), **ends})

    def check_place(self, *, lag: int, bound: int) -> None:
        """Rejects a step with values that lag further behind, if only the next members renew them.

        Raises:
            MembershipChangedError: servers let no trainer wait any more, since the members change.
        """
        if lag > bound and self.following is not None:
            raise MembershipChangedError(self.following)

    def leave(self, wait: Callable[[Sequence[PendingRequest]], None]) -> Message | None:
        """Waits until the others have taken their places without this trainer.

        Returns the answer of server 0, None if it has forgotten this trainer by then.

        Raises:
            MembershipChangedError: it is among the next members, and asks again in its new place.
            ProgramError: the job cannot go on without it.
        """
        asked = self.sender.request(0, Kind.LEAVE)
        for _ in range(_TOLD):
            try:
                wait([asked])
            except MembershipChangedError as change:
                told = change.membership
                if told is None or self._is_among(told):
                    raise
            else:
                return asked.answer
        return None

    @property
    def is_left_out(self) -> bool:
        """Whether the next members are known, and this trainer is none of them."""
        return self.following is not None and not self._is_among(self.following)

    def _is_among(self, members: Membership) -> bool:
        return members.number_of(self.sender.me.session) is not None

    def end_epoch(
        self, members: Membership, wait: Callable[[Sequence[PendingRequest]], None]
    ) -> None:
        """Waits until servers have in checkpoints what this trainer did, if they keep any.

        What it sent of a step that it begins again is void: a server that is started again would
        complete that step for others.

        Raises:
            MembershipChangedError: servers have told of newer members than these.
            PeerLostError: a server is lost, or lacks what only a lost trainer had.
        """
        sender, self._ends = self.sender, True
        for known in sender.servers:
            known.rewind(sender.step)
        asked = [self._tell(server, members) for server in range(len(sender.servers))]
        while not all(request.is_done for request in asked):
            try:
                wait(asked)
            except MembershipChangedError as change:  # also of a request before these
                if change.is_newer_than(members):
                    raise
                if change.begun_at is not None:
                    sender.servers[change.begun_at].is_past = True
            asked = [request for request in asked if not sender.servers[request.server].is_past]
