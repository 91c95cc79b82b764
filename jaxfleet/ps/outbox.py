"""What a trainer sends: numbered, counted, and kept for servers that may have to hear it again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.ps.known_server import KnownServer
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.messages import Kind, Message, Plain, Tensor
from jaxfleet.ps.network import Lines
from jaxfleet.ps.options import Patience
from jaxfleet.ps.requests import Request


@dataclass
class Outbox:
    """Where a trainer's messages leave.

    Attributes:
        lines: to all servers.
        me: who sends.
        patience: what a hello says of deadlines.
        servers: what is known of each.
        step: the one that the trainer is at.
        rows: of the whole batch of that step; all trainers must say the same.
        sent_bytes: of arrays.
    """

    lines: Lines
    me: Membership
    patience: Patience
    servers: list[KnownServer]
    step: int = 0
    rows: int = 0
    sent_bytes: int = 0

    def request(
        self,
        server: int,
        kind: Kind,
        *,
        step: int | None = None,
        body: Mapping[str, Plain] | None = None,
        tensors: Iterable[Tensor] = (),
        wants: Iterable[str] = (),
        sink: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> Request:
        """Sends a request, and returns it."""
        message = self._message(server, kind, step, body or {}, tuple(tensors))
        found = Request(server, message, set(wants), sink)
        known = self.servers[server]
        known.waiting[message.number] = found
        if kind is not Kind.ASSIGN or message.body.get("replace"):
            known.replay.add_together(message, self.step)
        self.send(server, message)
        return found

    def push(
        self, server: int, tensors: Iterable[Tensor], encoded: Mapping[str, Plain] | None = None
    ) -> None:
        """Sends gradients of the present step, some of them encoded; nothing answers."""
        body: dict[str, Plain] = {"rows": self.rows}
        if encoded:
            body["encoded"] = dict(encoded)
        self._push(server, Kind.PUSH, body, tensors)

    def push_rows(self, server: int, body: Mapping[str, Plain], tensors: Iterable[Tensor]) -> None:
        """Sends gradients of a table's rows, of the present step; nothing answers."""
        self._push(server, Kind.PUSH_ROWS, body, tensors)

    def _push(
        self, server: int, kind: Kind, body: Mapping[str, Plain], tensors: Iterable[Tensor]
    ) -> None:
        known = self.servers[server]
        after = known.push_after(self.step, str(body.get("table", "")))
        message = self._message(server, kind, None, {**body, "after": after}, tuple(tensors))
        known.pushed = max(known.pushed, message.step)
        known.replay.add(message)
        self.send(server, message)

    def hello(self, server: int, *, is_first: bool = False) -> Request:
        """Says hello; for the first time with the text of the job's programs."""
        tensors = self.me.packed_text() if is_first else ()
        body = self.me.hello(self.patience)
        return self.request(server, Kind.HELLO, body=body, tensors=tensors)

    def define(self, server: int) -> Request:
        """Gives a server its program."""
        text, constants = self.me.programs[server]
        tensors = [Tensor(name, value) for name, value in constants.items()]
        return self.request(server, Kind.DEFINE, body={"program": text}, tensors=tensors)

    def check_pending(self, server: int) -> None:
        """Asks a server which of the requests that wait for it are missing there."""
        numbers: list[Plain] = list(self.servers[server].waiting)
        body: dict[str, Plain] = {"numbers": numbers}
        self.send(server, self._message(server, Kind.PENDING, None, body, ()))

    def send(self, server: int, message: Message) -> None:
        """Sends a message, the first time or again."""
        self.sent_bytes += sum(tensor.array.nbytes for tensor in message.tensors)
        self.lines.send(server, message)

    def _message(
        self,
        server: int,
        kind: Kind,
        step: int | None,
        body: Mapping[str, Plain],
        tensors: tuple[Tensor, ...],
    ) -> Message:
        known = self.servers[server]
        known.number += 1
        at = self.step if step is None else step
        return Message(kind, self.me.name, at, known.number, body, tensors)
