"""Sends numbered requests and pushes, keeps them, and replays them to a server that restarted."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.errors import PeerLostError
from jaxfleet.observability.notices import alert
from jaxfleet.ps.client.lease_log import LeaseLog
from jaxfleet.ps.client.server_session import PendingRequest, ServerRestartedError, ServerSession
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Connections, Kind, Message, Plain, Tensor

_SAVE_AGAIN_S = 10.0  # after a server lacked space for its checkpoint
_MOST_FULL = 4  # times the limit, while servers lack space
_UNAPPLIED_BYTES = 1 << 28  # of pushes kept until they are applied


@dataclass
class ReplayBudget:
    """The pushes kept for all servers together.

    At most `limit_bytes` are kept until recovery checkpoints contain them. It is 0 if servers are
    never restarted: pushes are then kept until applied.
    """

    name: str
    servers: Sequence[ServerSession]
    limit_bytes: int
    clock: Callable[[], float]
    _save_at: float = 0.0  # when to request checkpoints again
    _has_warned: bool = False

    @property
    def bytes(self) -> int:
        return sum(server.replay.bytes for server in self.servers)

    @property
    def is_full(self) -> bool:
        return self._keeps(self.limit_bytes)

    @property
    def is_half_full(self) -> bool:
        """Whether to request checkpoints now, with room for pushes until they are written."""
        return self._keeps(self.limit_bytes / 2)

    def _keeps(self, least: float) -> bool:
        return 0 < least <= self.bytes and self.clock() >= self._save_at

    def put_off_saving(self) -> None:
        """Postpones checkpoint requests: a server lacks space, so pushes are kept meanwhile."""
        self._save_at = self.clock() + _SAVE_AGAIN_S

    def forget_saved(self, server: int, step: int) -> None:
        """Discards the pushes that a server's checkpoint after a step contains."""
        self.servers[server].replay.saved(step)

    def bound(self) -> None:
        """Discards the oldest pushes while servers do not apply or save them."""
        most = _MOST_FULL * self.limit_bytes or _UNAPPLIED_BYTES
        if (excess := self.bytes - most) > 0:
            fullest = max(self.servers, key=lambda known: known.replay.bytes)
            if fullest.replay.shrink(excess) and self.limit_bytes and not self._has_warned:
                self._has_warned = True
                alert(
                    f"{self.name} keeps {most} bytes of pushes that servers have no room to "
                    "save, and forgets the oldest: a server that dies now ends the job"
                )


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


_REPLAY_WINDOW = 8  # steps replayed before waiting for the first of them


@dataclass(frozen=True)
class Recovery:
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
