"""Recovery of a server that was started again: what a trainer sends it again."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxfleet.errors import PeerLostError
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.request_sender import RequestSender
from jaxfleet.ps.client.server_session import ServerRestartedError
from jaxfleet.transport.messages import Kind, Message

_REPLAY_WINDOW = 8  # steps replayed before waiting for the first of them


@dataclass(frozen=True)
class ServerRecovery:
    """Replays requests and pushes to restarted servers.

    `wait` receives until requests are answered, like `Client.wait`; it may find that another server
    restarted, and recover that one first.
    """

    outbox: RequestSender
    wait: Callable[[Sequence[PendingRequest]], None]

    def bring_level(self, server: int) -> None:
        """Replays the pushes that a server lacks, and resends all pending requests.

        Raises:
            PeerLostError: some of the pushes are permanently lost.
        """
        known = self.outbox.servers[server]
        known.is_returning = True
        self.outbox.has_sent = False  # waiting for a restart is no part of an exchange
        try:
            while not known.is_level:
                before = dict(known.waiting)
                known.held_back = frozenset(before)
                try:
                    self._return(server, list(before.values()))
                    known.is_level = True
                except ServerRestartedError as again:
                    if again.server != server:
                        raise
                finally:
                    known.waiting = {n: r for n, r in known.waiting.items() if n in before}
        finally:
            known.is_returning, known.held_back = False, frozenset()

    def see_new(self, server: int, incarnation: str) -> None:
        """Handles heartbeats of an incarnation without a welcome; may start a recovery over."""
        known = self.outbox.servers[server]
        if known.is_open and not known.is_returning:
            known.is_level = False
        elif known.greeted in ("", incarnation):
            known.greeted = incarnation  # the hello in flight is for this incarnation
        elif known.is_open:
            raise ServerRestartedError(server)
        else:
            known.greeted = incarnation
            for request in known.waiting.values():
                self.outbox.send(server, request.message)

    def see_stranger(self, server: int) -> None:
        """Handles a `stranger` error of a server with a welcome; may start a recovery over."""
        known = self.outbox.servers[server]
        if not known.is_returning:
            known.is_level = False
        elif known.is_greeted:  # otherwise the error concerns a message before the hello
            raise ServerRestartedError(server)

    def send_missing(self, server: int, answer: Message) -> None:
        """Resends the requests and pushes that a server has not received."""
        known, body = self.outbox.servers[server], answer.body
        missing, step = body.get("missing"), body.get("step")
        for number in missing if isinstance(missing, list) else []:
            request = known.waiting.get(number) if isinstance(number, int) else None
            if request is not None and number not in known.held_back:
                known.repeated.add(request.message.number)
                self.outbox.send(server, request.message)
        if body.get("lacks") and isinstance(step, int):
            for _, pushes in known.replay.after(step):
                for message in pushes:
                    self.outbox.send(server, message)

    def _return(self, server: int, waiting: Sequence[PendingRequest]) -> None:
        outbox, known = self.outbox, self.outbox.servers[server]
        known.greeted, known.is_greeted = "", False
        hello = outbox.hello(server)
        self.wait([hello])
        assert hello.answer is not None
        is_same = str(hello.answer.body.get("incarnation")) in known.welcomes
        known.welcome(hello.answer)
        known.is_greeted = True
        # If only the connection was lost, it has returned to the state that is being restored.
        has_returned = is_same and outbox.restores
        lost = None if has_returned else known.lost_work()
        if lost is not None:
            what = f"{outbox.me.server_name(server)} cannot go on at step {outbox.step}: {lost}"
            hint = "let servers keep checkpoints; raise strategy.replay_bytes; start the job again"
            raise PeerLostError(what, hint=hint)
        if outbox.me.programs and outbox.me.trainer == 0 and not hello.answer.body.get("defined"):
            self.wait([outbox.define(server)])
        self._replay(server, waiting, pushes=not has_returned)

    def _replay(self, server: int, waiting: Sequence[PendingRequest], *, pushes: bool) -> None:
        outbox, known = self.outbox, self.outbox.servers[server]
        own = {request.message.number for request in waiting}
        for message in known.replay.together(outbox.step):
            if message.number not in own:
                known.repeated.add(message.number)
                outbox.send(server, message)
        if server == 0 and outbox.own.leaves:
            outbox.keep_again()
        under_way: deque[PendingRequest] = deque()
        whole = min(outbox.step - 1, known.sent_whole())  # of later ones only rows may be sent yet
        if outbox.restores:
            whole = -1  # others may have discarded theirs, to go on from another state
        for step, messages in known.replay.after(known.step) if pushes else ():
            for message in messages:
                outbox.send(server, message)
            if step <= whole:
                under_way.append(outbox.request(server, Kind.PULL, step=step, body={"names": []}))
            if len(under_way) > _REPLAY_WINDOW:
                self.wait([under_way.popleft()])
        self.wait(list(under_way))
        known.held_back = frozenset()
        for request in waiting:
            if not request.is_done:
                outbox.send(server, request.message)
