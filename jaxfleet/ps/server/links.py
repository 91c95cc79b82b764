"""What goes from a server to the other servers: parts of a step, and word that it lives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from jaxfleet.ps.messages import Kind, Message, Plain, Tensor
from jaxfleet.ps.server.peers import Known

_LONGEST = 200  # characters of what a server says that it does
_AGAIN_S = 1.0  # parts that seem to be missing there are not sent again sooner


@dataclass
class Links:
    """Keeps what was sent to the other servers for as long as one may ask for it again.

    Attributes:
        others: their numbers.
        out: messages that are to be sent, with the server each goes to.
        known: what was heard of each.
    """

    others: tuple[int, ...] = ()
    out: list[tuple[int, Message]] = field(default_factory=list)
    known: dict[int, Known] = field(default_factory=dict)
    _kept: dict[int, dict[int, Message]] = field(default_factory=dict)  # by server and step
    _sent: dict[tuple[int, int], float] = field(default_factory=dict)
    _beat: float = float("-inf")

    def send(self, message: Message, now: float) -> None:
        """Sends parts to all other servers, and keeps them."""
        for server in self.others:
            self._kept.setdefault(server, {})[message.step] = message
            self._post(server, message, now)

    def keep(self, message: Message) -> None:
        """Keeps parts that were sent in an earlier life, until others say what they lack."""
        for server in self.others:
            self._kept.setdefault(server, {})[message.step] = message

    def kept(self) -> dict[int, Message]:
        """Returns the parts that some other server may still ask for, by step."""
        return {step: m for steps in self._kept.values() for step, m in steps.items()}

    def number_of(self, sender: str) -> int | None:
        """Returns which of the other servers a message names as its sender."""
        return next((number for number in self.others if sender == f"server {number}"), None)

    def heard(self, server: int, message: Message, now: float) -> None:
        """Takes a heartbeat of another server: sends again what it lacks."""
        body = message.body
        old, doing = self.known.get(server), str(body.get("doing"))[:_LONGEST]
        fresh = Known(b"", now, now, doing, incarnation=str(body.get("incarnation")))
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
        """Tells the others that this server lives, where it is time to."""
        if self.others and now - self._beat >= every_s:
            self._beat = now
            beat = Message(Kind.HEARTBEAT, sender, body=body)
            self.out += [(server, beat) for server in self.others]

    def _post(self, server: int, message: Message, now: float) -> None:
        self._sent[server, message.step] = now
        self.out.append((server, message))


def parts_message(
    sender: str, step: int, arrays: Iterable[Tensor], body: Mapping[str, Plain]
) -> Message:
    """Returns the message with a server's parts; it owns its arrays."""
    tensors = tuple(replace(tensor, array=tensor.array.copy()) for tensor in arrays)
    return Message(Kind.PARTS, sender, step, body=body, tensors=tensors)
