"""Links to other servers: exchange of partial sums, and heartbeats."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfleet.observability import printable
from jaxfleet.ps.server.options import ServerIdentity
from jaxfleet.ps.server.outbox import Outbox, RequestError, tensors_bytes
from jaxfleet.ps.server.peer_state import PeerState
from jaxfleet.ps.server.state import ServerState
from jaxfleet.transport.messages import Kind, Message, Plain, Tensor

_LONGEST_TEXT = 200  # characters of a server's activity
_AGAIN_S = 1.0  # minimum interval of resending partial sums


@dataclass
class ServerLinks:
    """Messages to the other servers, kept as long as one may request them again.

    Those `out` are to be sent, with the number of the recipient.
    """

    others: tuple[int, ...] = ()
    out: list[tuple[int, Message]] = field(default_factory=list)
    known: dict[int, PeerState] = field(default_factory=dict)
    _kept: dict[int, dict[int, Message]] = field(default_factory=dict)  # by server and step
    _sent: dict[tuple[int, int], float] = field(default_factory=dict)
    _beat: float = float("-inf")

    def send(self, message: Message, now: float) -> None:
        """Sends partial sums to all other servers, and keeps them."""
        for server in self.others:
            self._kept.setdefault(server, {})[message.step] = message
            self._post(server, message, now)

    def keep(self, message: Message) -> None:
        """Keeps partial sums sent before a restart, until other servers report their steps."""
        for server in self.others:
            self._kept.setdefault(server, {})[message.step] = message

    def renew(self, program: str) -> None:
        """Gives the kept partial sums the hash of the program for other trainers."""
        for steps in self._kept.values():
            for step, message in steps.items():
                steps[step] = replace(message, body={**message.body, "program": program})

    def kept(self) -> dict[int, Message]:
        """Returns the partial sums that other servers may still request, by step."""
        return {step: m for steps in self._kept.values() for step, m in steps.items()}

    def number_of(self, sender: str) -> int | None:
        return next((number for number in self.others if sender == f"server {number}"), None)

    def heard(self, server: int, message: Message, now: float) -> None:
        """Handles a heartbeat of another server, and resends the partial sums that it lacks."""
        body = message.body
        old, doing = self.known.get(server), printable(str(body.get("doing")), _LONGEST_TEXT)
        fresh = PeerState(b"", now, now, doing, incarnation=str(body.get("incarnation")))
        self.known[server] = fresh
        step, saved = (body.get(key) for key in ("step", "saved"))
        if not isinstance(step, int):
            return
        kept = self._kept.get(server, {})
        for done in [n for n in kept if n <= (saved if isinstance(saved, int) else step)]:
            del kept[done]
            self._sent.pop((server, done), None)
        restarted = old is None or old.incarnation != fresh.incarnation
        for later in sorted(kept) if restarted else [n for n in kept if n == step + 1]:
            if restarted or now - self._sent.get((server, later), 0.0) >= _AGAIN_S:
                self._post(server, kept[later], now)

    def beat(self, body: Mapping[str, Plain], sender: str, now: float, every_s: float) -> None:
        if self.others and now - self._beat >= every_s:
            self._beat = now
            beat = Message(Kind.HEARTBEAT, sender, body=body)
            self.out += [(server, beat) for server in self.others]

    def _post(self, server: int, message: Message, now: float) -> None:
        self._sent[server, message.step] = now
        self.out.append((server, message))


_MOST_AHEAD = 1 << 16  # steps that another server may be ahead


@dataclass
class PartialSums:
    """Partial sums exchanged between servers."""

    held: ServerState
    outbox: Outbox
    links: ServerLinks
    me: ServerIdentity
    most_bytes: int
    clock: Callable[[], float]

    def take(self, message: Message) -> None:
        """Takes another server's partial sums of a step."""
        plan, scheduler = self.held.plan, self.held.scheduler
        for tensor in message.tensors:
            server = plan.exchange.there.get(tensor.name) if plan.exchange is not None else None
            wanted = plan.types.get(tensor.name)
            if f"server {server}" != message.sender or wanted is None:
                raise RequestError(
                    "bad_message", f"'{tensor.name}' is not a part of {message.sender}"
                )
            if (tensor.array.dtype, tensor.array.shape) != (wanted.dtype, wanted.shape):
                raise RequestError("bad_message", f"part '{tensor.name}' has another type")
        if scheduler.queued_bytes + tensors_bytes(message.tensors) > self.most_bytes:
            what = f"too much waits for later steps than {scheduler.applied}"
            raise RequestError("bad_message", what)
        if message.step > scheduler.step + _MOST_AHEAD:
            what = f"step {message.step} is far from {scheduler.applied}"
            raise RequestError("bad_message", what)
        scheduler.take_parts(message.step, message.tensors)

    def send_made(self, step: int, made: Collection[str]) -> None:
        """Sends this server's partial sums of a step once the last of them is computed."""
        exchange, scheduler = self.held.plan.exchange, self.held.scheduler
        if exchange is None or not any(name in made for name in exchange.here):
            return
        makers, server = {self.held.plan.makers[name] for name in exchange.here}, -1
        if all(scheduler.has_made(maker, step, server) for maker in makers):
            tensors = [Tensor(name, self.held.host[name]) for name in exchange.here]
            self.links.send(self._message(step, tensors), self.clock())

    def keep(self, parts: Mapping[int, Mapping[str, np.ndarray]]) -> None:
        for step, arrays in parts.items():
            tensors = (Tensor(name, array) for name, array in arrays.items())
            self.links.keep(self._message(step, tensors))

    def _message(self, step: int, tensors: Iterable[Tensor]) -> Message:
        body: dict[str, Plain] = {"program": self.me.program, "incarnation": self.me.incarnation}
        copies = tuple(replace(tensor, array=tensor.array.copy()) for tensor in tensors)
        return Message(Kind.PARTS, self.outbox.name, step, body=body, tensors=copies)
