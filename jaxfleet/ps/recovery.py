"""Brings a server that started again level: hello, and all that came after its checkpoint."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxfleet.errors import PeerLostError
from jaxfleet.ps.known_server import StartedAgainError
from jaxfleet.ps.messages import Kind, Message
from jaxfleet.ps.outbox import Outbox
from jaxfleet.ps.requests import Request

_WINDOW = 8  # steps that are sent anew before the first of them is waited for


@dataclass(frozen=True)
class Recovery:
    """Brings servers level.

    Attributes:
        outbox: sends to them.
        wait: receives until requests are answered, as `Client.wait` does; it may find that another
            server started again, and bring that one level first.
    """

    outbox: Outbox
    wait: Callable[[Sequence[Request]], None]

    def bring_level(self, server: int) -> None:
        """Sends a server what it lacks, and again all that waits for its answer.

        Raises:
            PeerLostError: what it lacks is lost for good.
        """
        known = self.outbox.servers[server]
        known.is_returning = True
        try:
            while not known.is_level:
                before = dict(known.waiting)
                try:
                    self._return(server, list(before.values()))
                    known.is_level = True
                except StartedAgainError as again:
                    if again.server != server:
                        raise
                finally:
                    known.waiting = {n: r for n, r in known.waiting.items() if n in before}
        finally:
            known.is_returning = False

    def see_new(self, server: int, incarnation: str) -> None:
        """Notes that heartbeats come from a server that has not said welcome.

        Raises:
            StartedAgainError: it is not the one that is being brought level.
        """
        known = self.outbox.servers[server]
        if known.is_open and not known.is_returning:
            known.is_level = False
        elif known.greeted in ("", incarnation):
            known.greeted = incarnation  # the hello that is under way is for this one
        elif known.is_open:
            raise StartedAgainError(server)
        else:
            known.greeted = incarnation
            for request in known.waiting.values():
                self.outbox.send(server, request.message)

    def see_stranger(self, server: int) -> None:
        """Notes that a server which said welcome says now that it knows nobody here.

        Raises:
            StartedAgainError: it said welcome since it was found to have started again.
        """
        known = self.outbox.servers[server]
        if not known.is_returning:
            known.is_level = False
        elif known.is_greeted:  # else it says so of what it was sent before the hello
            raise StartedAgainError(server)

    def send_missing(self, server: int, answer: Message) -> None:
        """Sends again the requests that a server does not have, and the pushes that it lacks.

        Args:
            server: which.
            answer: to `pending`: the numbers that are missing there, and its step.
        """
        known, body = self.outbox.servers[server], answer.body
        missing, step = body.get("missing"), body.get("step")
        for number in missing if isinstance(missing, list) else []:
            request = known.waiting.get(number) if isinstance(number, int) else None
            if request is not None:
                known.repeated.add(request.message.number)
                self.outbox.send(server, request.message)
        if body.get("lacks") and isinstance(step, int):
            for _, pushes in known.replay.after(step):
                for message in pushes:
                    self.outbox.send(server, message)

    def _return(self, server: int, waiting: Sequence[Request]) -> None:
        outbox, known = self.outbox, self.outbox.servers[server]
        known.greeted, known.is_greeted = "", False
        hello = outbox.hello(server)
        self.wait([hello])
        assert hello.answer is not None
        known.welcome(hello.answer)
        known.is_greeted = True
        lost = known.lost_work()
        if lost is not None:
            what = f"{outbox.me.server_name(server)} cannot go on at step {outbox.step}: {lost}"
            hint = "let servers keep checkpoints; raise strategy.replay_bytes; start the job again"
            raise PeerLostError(what, hint=hint)
        if outbox.me.programs and outbox.me.trainer == 0 and not hello.answer.body.get("defined"):
            self.wait([outbox.define(server)])
        self._replay(server, waiting)

    def _replay(self, server: int, waiting: Sequence[Request]) -> None:
        outbox, known = self.outbox, self.outbox.servers[server]
        own = {request.message.number for request in waiting}
        for message in known.replay.together(outbox.step):
            if message.number not in own:
                known.repeated.add(message.number)
                outbox.send(server, message)
        under_way: deque[Request] = deque()
        for step, pushes in known.replay.after(known.step):
            for message in pushes:
                outbox.send(server, message)
            if step < outbox.step:
                under_way.append(outbox.request(server, Kind.PULL, step=step, body={"names": []}))
            if len(under_way) > _WINDOW:
                self.wait([under_way.popleft()])
        self.wait(list(under_way))
        for request in waiting:
            if not request.is_done:
                outbox.send(server, request.message)
