"""Numbered requests and pushes of a trainer, which it keeps to send them again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.ps.client.lease_log import LeaseLog
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.replay_log import ReplayBudget
from jaxfleet.ps.client.server_session import ServerSession
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Connections, Kind, Message, Plain, Tensor


@dataclass
class KeptLeaves:
    """The newest version of each leaf of the trainers' own state, and the step of the newest."""

    step: int = -1
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def note(self, step: int, tensors: Iterable[Tensor]) -> None:
        self.step = step
        self.leaves.update((tensor.name, tensor) for tensor in tensors)

    def clear(self) -> None:
        """Discards all: the job goes on from another state."""
        self.step = -1
        self.leaves.clear()


@dataclass(eq=False, repr=False)
class RequestSender:
    """Numbers and sends a trainer's messages.

    `rows` are those of the step's global batch, of which all trainers must report the same number.
    `leases` are samples leased from server 0, to which pushes acknowledge them.
    `has_sent` means that pushes were sent since the last wait. `own` is what trainer 0 has kept on
    server 0 in the relaxed modes.
    """

    connections: Connections
    me: TrainerIdentity
    timeouts: Timeouts
    servers: Sequence[ServerSession]
    replay: ReplayBudget
    step: int = 0
    rows: int = 0
    sent_bytes: int = 0
    has_sent: bool = False
    leases: LeaseLog = field(init=False)
    own: KeptLeaves = field(default_factory=KeptLeaves)

    def __post_init__(self) -> None:
        self.leases = LeaseLog(until_saved=self.replay.limit_bytes > 0)

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
    ) -> PendingRequest:
        message = self._message(server, kind, step, body or {}, tuple(tensors))
        found = PendingRequest(server, message, set(wants), sink)
        known = self.servers[server]
        known.waiting[message.number] = found
        if kind is not Kind.ASSIGN or message.body.get("replace"):
            known.replay.add_together(message, self.step)
        self.send(server, message)
        return found

    def awaits(self, request: PendingRequest) -> bool:
        """Whether a request has neither an answer nor an error yet."""
        return request.message.number in self.servers[request.server].waiting

    @property
    def restores(self) -> bool:
        """Whether it waits for the others, or for servers, to go on from a restored state."""
        waiting = (r.message for known in self.servers for r in known.waiting.values())
        return any(m.kind is Kind.LOAD or m.body.get("rewinds") for m in waiting)

    def push(
        self, server: int, tensors: Iterable[Tensor], encoded: Mapping[str, Plain] | None = None
    ) -> None:
        """Sends gradients of the current step; there is no reply."""
        body: dict[str, Plain] = {"rows": self.rows}
        if encoded:
            body["encoded"] = dict(encoded)
        self._push(server, Kind.PUSH, self._with_leases(server, body), tensors)

    def idle(self) -> None:
        """Sends all servers the current step, which has no gradients."""
        for server in range(len(self.servers)):
            body: dict[str, Plain] = {"rows": self.rows, "idle": True}
            self._push(server, Kind.PUSH, self._with_leases(server, body), ())

    def confirm(self) -> list[PendingRequest]:
        """Asks all servers to answer once this step is applied, also to tables."""
        body: dict[str, Plain] = {"names": []}
        return [self.request(at, Kind.PULL, body=body) for at in range(len(self.servers))]

    def _with_leases(self, server: int, body: dict[str, Plain]) -> dict[str, Plain]:
        leases = self.leases.push(self.step) if server == 0 else []
        return {**body, "leases": leases} if leases else body

    def push_rows(self, server: int, body: Mapping[str, Plain], tensors: Iterable[Tensor]) -> None:
        self._push(server, Kind.PUSH_ROWS, body, tensors)

    def _push(
        self, server: int, kind: Kind, body: Mapping[str, Plain], tensors: Iterable[Tensor]
    ) -> None:
        known = self.servers[server]
        after = known.push_after(self.step, str(body.get("table", "")))
        took_s, known.exchange_s = known.exchange_s, 0.0
        body = {**body, "after": after, "took_s": took_s}
        message = self._message(server, kind, None, body, tuple(tensors))
        known.pushed = max(known.pushed, message.step)
        known.replay.add(message)
        began = self.replay.clock()
        self.send(server, message)
        self.has_sent = True
        self.spent(self.replay.clock() - began)
        self.replay.bound()

    def spent(self, seconds: float) -> None:
        """Counts time of an exchange, which the next push reports: a replay would take it again."""
        for known in self.servers:
            known.exchange_s += seconds

    def keep(self, tensors: Iterable[Tensor], *, each: bool = False) -> PendingRequest:
        """Sends leaves of the trainers' own state after this step, to server 0.

        It keeps one version for all trainers, or one for `each`.

        A checkpoint of this step may be earlier, so they are replayed like pushes of the next one.
        In the relaxed modes there may be no next push for long, so the newest version of each leaf
        is replayed to any restarted server 0.
        """
        body: dict[str, Plain] = {"each": True} if each else {}
        found = self.request(0, Kind.KEEP, body=body, tensors=tensors)
        if self.me.is_sync:
            self.servers[0].replay.add(found.message, self.step + 1)
        else:
            self.own.note(self.step, found.message.tensors)
        return found

    def keep_again(self) -> None:
        """Sends server 0, which was restarted, the newest version of each leaf."""
        tensors = tuple(self.own.leaves.values())
        self.send(0, self._message(0, Kind.KEEP, self.own.step, {}, tensors))

    def hello(self, server: int, *, is_first: bool = False) -> PendingRequest:
        """Sends a hello; the first one includes the text of the job's programs."""
        tensors = self.me.packed_text() if is_first else ()
        body = self.me.hello(self.timeouts, self.step)
        if server == 0 and self.leases.order:
            body["data"] = self.leases.declared()
        return self.request(server, Kind.HELLO, body=body, tensors=tensors)

    def define(self, server: int) -> PendingRequest:
        text, constants = self.me.programs[server]
        tensors = [Tensor(name, value) for name, value in constants.items()]
        return self.request(server, Kind.DEFINE, body={"program": text}, tensors=tensors)

    def check_pending(self, server: int) -> None:
        """Asks a server which of the pending requests, and of the pushes, it has not received."""
        known = self.servers[server]
        body: dict[str, Plain] = {"numbers": list(known.waiting), "pushed": known.pushed}
        self.send(server, self._message(server, Kind.PENDING, None, body, ()))

    def send(self, server: int, message: Message) -> None:
        self.sent_bytes += sum(tensor.array.nbytes for tensor in message.tensors)
        self.connections.send(server, message)

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
