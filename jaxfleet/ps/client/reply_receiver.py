"""Dispatch of the messages of servers: answers, errors, and signs of a restart."""

from dataclasses import dataclass

from jaxfleet.ps.client.membership_watch import MembershipWatch
from jaxfleet.ps.client.pending_request import refusal_error
from jaxfleet.ps.client.request_sender import RequestSender
from jaxfleet.ps.client.server_recovery import ServerRecovery
from jaxfleet.ps.client.server_session import ServerSession, value_clock
from jaxfleet.ps.membership import CHANGED, Membership, MembershipChangedError
from jaxfleet.transport.messages import Kind, Message

_CHECK_S = 3.0  # a reply or a request may be lost with a connection
_MOST_DAMAGED = 5  # consecutive frames that a server could not read, on a new connection, too


@dataclass
class ReplyReceiver:
    """Receives the messages of all servers.

    Attributes:
        check_s: how long nothing may be answered or applied until it asks what has arrived.
    """

    sender: RequestSender
    members: MembershipWatch
    recovery: ServerRecovery
    check_s: float = _CHECK_S
    received_bytes: int = 0

    def receive(self, timeout_s: float) -> bool:
        """Takes the next message; returns False if none comes in time."""
        received = self.sender.connections.receive(timeout_s)
        if received is not None:
            self._take(*received)
        return received is not None

    def _take(self, server: int, message: Message) -> None:
        self.received_bytes += sum(tensor.array.nbytes for tensor in message.tensors)
        known = self.sender.servers[server]
        if message.kind is Kind.ERROR:
            self._take_error(server, known, message)
            return
        if message.kind is Kind.PENDING:
            self.recovery.send_missing(server, message)
            return
        if "members" in message.body and not self.sender.me.is_sync:
            self.members.look(Membership.of(message.body))
        request = known.waiting.get(message.number)  # None for a second reply to a repeated one
        if request is not None and not known.is_void_answer(request):
            request.take(message)
            known.clock = value_clock(message, known.clock)
            if request.is_done:
                known.has_answered(request)

    def _take_error(self, server: int, known: ServerSession, message: Message) -> None:
        """Raises a server's error, unless it was raised before or concerns only others."""
        number = message.number
        if message.body.get("error") == "stranger" and known.is_open:
            if number not in known.repeated:
                self.recovery.see_stranger(server)
        elif not number and message.body.get("error") == "bad_message" and known.is_open:
            known.damaged += 1  # a frame too damaged to identify its request
            if known.damaged > _MOST_DAMAGED:
                if known.is_renewed:
                    raise refusal_error(self.sender.me, server, message)
                # Bytes that were lost on the way shift all that follow on the connection.
                known.damaged, known.is_renewed = 0, True
                self.sender.connections.renew(server)
            self.sender.check_pending(server)
        elif number not in known.repeated or number in known.waiting:
            if known.waiting.pop(number, None) is not None:
                known.repeated.add(number)
            if message.body.get("error") == CHANGED:
                self.members.note(Membership.of(message.body))
                begun_at = server if message.body.get("has_begun") is True else None
                raise MembershipChangedError(self.members.following, begun_at)
            raise refusal_error(self.sender.me, server, message)

    def check_due(self, now: float) -> None:
        """Checks overdue requests and pushes: a connection may have lost them or their replies."""
        renewed = self.sender.connections.renewed()
        for server, known in enumerate(self.sender.servers):
            due = known.is_due(now, self.check_s)
            if known.is_open and (due or server in renewed):
                known.check_at_s = now + self.check_s
                self.sender.check_pending(server)
