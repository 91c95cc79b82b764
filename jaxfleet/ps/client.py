"""A trainer's end: numbered requests to all servers, waited for together, sent again when due.

One thread uses it. Requests return at once; `wait` receives until they are answered, hands arrays
to their sinks as they come, and notices servers that fail, go, or have started again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from jaxfleet.errors import ConnectError, JaxfleetError, PeerLostError, ProgramError
from jaxfleet.ps.client_errors import late, lost, refused, waited_for
from jaxfleet.ps.heartbeat import Heartbeat
from jaxfleet.ps.known_server import KnownServer, clock_of
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.messages import Kind, Message, Plain, Tensor
from jaxfleet.ps.network import Lines
from jaxfleet.ps.options import Patience
from jaxfleet.ps.outbox import Outbox
from jaxfleet.ps.recovery import Recovery
from jaxfleet.ps.replay import ReplayLog
from jaxfleet.ps.requests import Request
from jaxfleet.watch import NO_SPANS, LongWait, Spans
from jaxfleet.watch.notices import alert

_POLL_S = 0.25  # how often a wait looks at heartbeats
_HELLO_AGAIN_S = 5.0  # a hello may have gone to a stranger who had the server's port before it
_CHECK_S = 3.0  # an answer, or a request, may be lost with a connection
_CHECK_BYE_S = 0.5
_MOST_DAMAGED = 5  # frames that a server could not read, in a row: more are no accident
_BYE_S = 2.0
_SAVE_AGAIN_S = 10.0  # after a server had no room for its checkpoint
_MOST_FULL = 4  # times replay_bytes: what is kept while servers have no room
_UNAPPLIED_BYTES = 1 << 28  # of pushes that are kept until they are applied


class Client:
    """A trainer's lines to the servers of its job.

    Args:
        lines: to all servers.
        me: who this is.
        patience: deadlines.
        heartbeat: knows which servers live; without one, only deadlines count.
        replay_bytes: how many bytes of pushes to keep, for all servers together, until they are in
            servers' own checkpoints; 0 where no server is started again, and then pushes are kept
            until they are applied.
        clock: the time in seconds.
        spans: notes what this trainer does when.
    """

    def __init__(
        self,
        lines: Lines,
        me: Membership,
        *,
        patience: Patience,
        heartbeat: Heartbeat | None = None,
        replay_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans = NO_SPANS,
    ) -> None:
        self.me, self.spans = me, spans
        self.received_bytes = 0
        self.rewinds = 0
        self._lines, self._patience, self._clock = lines, patience, clock
        self._heartbeat = heartbeat
        self._replay_bytes = replay_bytes
        self._servers = [KnownServer(ReplayLog(replay_bytes > 0)) for _ in me.endpoints]
        self._outbox = Outbox(lines, me, patience, self._servers)
        self._hello_at = 0.0  # when to say it again
        self._check_s = _CHECK_S
        self._save_at = 0.0  # when servers may be asked for checkpoints again
        self._has_warned = False
        self._looked = clock()
        self._recovery = Recovery(self._outbox, self.wait)

    @property
    def step(self) -> int:
        """The step that this trainer is at."""
        return self._outbox.step

    @step.setter
    def step(self, step: int) -> None:
        self._outbox.step = step

    def next_step(self, rows: int) -> None:
        """Goes on to the next step, whose whole batch has so many rows."""
        self._outbox.step += 1
        self._outbox.rows = rows

    def rewind(self, step: int) -> None:
        """Forgets what was sent after a step, to whose state the servers go back."""
        self.rewinds += 1
        for known in self._servers:
            known.rewind(step)

    def has_pushed(self, step: int) -> bool:
        """Tells whether a server was sent gradients of a step."""
        return any(known.pushed >= step for known in self._servers)

    @property
    def sent_bytes(self) -> int:
        """How many bytes of arrays were sent."""
        return self._outbox.sent_bytes

    def open(self) -> int:
        """Says hello to all servers, and gives them their programs where they have none.

        Returns:
            The last step that they have applied; -1 where they have no state yet.

        Raises:
            ConnectError: a server does not answer.
            ProgramError: a server refuses this trainer.
        """
        servers = range(len(self._servers))
        hellos = [self._outbox.hello(server, is_first=True) for server in servers]
        self._hello_at = self._clock() + _HELLO_AGAIN_S
        self.wait(hellos, self._patience.connect_s, ConnectError)
        for server, hello in enumerate(hellos):
            assert hello.answer is not None
            self._servers[server].welcome(hello.answer)
        steps = [server.step for server in self._servers]
        if len({max(step, 0) for step in steps}) > 1:
            what = f"the servers go on from steps {', '.join(map(str, steps))}, which differ"
            hint = "give them empty folders for checkpoints, and restore a checkpoint of the job"
            raise ProgramError(what, hint=hint)
        if self.me.trainer == 0 and self.me.programs:
            self.wait([self._outbox.define(server) for server in servers])
        return min(steps)

    def doing(self, text: str) -> None:
        """Says what this trainer does, for heartbeats."""
        if self._heartbeat is not None:
            self._heartbeat.doing(text)

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
        """Sends a request, and returns it for `wait`."""
        return self._outbox.request(
            server, kind, step=step, body=body, tensors=tensors, wants=wants, sink=sink
        )

    def push(
        self, server: int, tensors: Iterable[Tensor], encoded: Mapping[str, Plain] | None = None
    ) -> None:
        """Sends gradients of the present step; nothing answers.

        Args:
            server: which server.
            tensors: they.
            encoded: method and shape of those that `compression` made smaller.
        """
        self._outbox.push(server, tensors, encoded)
        self._bound_replay()

    def push_rows(self, server: int, body: Mapping[str, Plain], tensors: Iterable[Tensor]) -> None:
        """Sends gradients of a table's rows, of the present step; nothing answers."""
        self._outbox.push_rows(server, body, tensors)
        self._bound_replay()

    def begin_step(self) -> None:
        """Tells servers that were sent nothing in this step that this trainer is at it.

        They may then change what it has received, for what others sent.
        """
        for server, known in enumerate(self._servers):
            if known.pushed < self.step:
                self._outbox.push(server, ())

    def wait(
        self,
        requests: Sequence[Request],
        timeout_s: float | None = None,
        error: type[JaxfleetError] = PeerLostError,
    ) -> None:
        """Receives until the requests are answered.

        Raises:
            PeerLostError: a server, or a trainer that a server waits for, went or takes too long.
            ProgramError: a server refuses a request.
        """
        first = next((request for request in requests if not request.is_done), None)
        if first is None:
            return
        limit = timeout_s if timeout_s is not None else self._longest_s()
        with self.spans.span(f"wait for {first.message.kind.value}", step=self.step):
            self._receive_until(requests, limit, error)

    def _receive_until(
        self, requests: Sequence[Request], limit: float, error: type[JaxfleetError]
    ) -> None:
        deadline, wait = self._clock() + limit, LongWait(self._clock)
        while not all(request.is_done for request in requests):
            left = deadline - self._clock()
            if left <= 0:
                raise self._late(requests, limit, error)
            received = self._lines.receive(min(left, _POLL_S))
            if received is not None:
                self._take(*received)
            self._look(requests, at_once=received is None)
            self._bring_level()
            wait.look(lambda: self._described(requests))

    def poll(self) -> None:
        """Takes what has come, and waits for nothing; looks after servers now and then."""
        while (received := self._lines.receive(0.0)) is not None:
            self._take(*received)
        self._look(())
        self._bring_level()

    def _look(self, requests: Sequence[Request], *, at_once: bool = False) -> None:
        """Looks after servers, and after requests whose answers do not come, now and then."""
        now = self._clock()
        if at_once or now - self._looked >= _POLL_S:
            self._looked = now
            self._look_at_servers(requests)
            self._say_hello_again(requests)
            self._check_pending(now)

    @property
    def clock(self) -> int:
        """The step until which the newest values have all that any trainer sent, if they say."""
        clocks = [known.clock for known in self._servers if known.clock >= 0]
        return min(clocks, default=self.step)

    def restart_clock(self) -> None:
        """Forgets how old values are: all trainers begin anew."""
        for known in self._servers:
            known.clock = -1

    def forget_saved(self, server: int, step: int) -> None:
        """Forgets what was kept for a server until its checkpoint after a step."""
        self._servers[server].replay.saved(step)

    @property
    def replay_bytes(self) -> int:
        """The bytes of pushes that are kept, for all servers together."""
        return sum(server.replay.bytes for server in self._servers)

    @property
    def is_replay_full(self) -> bool:
        """Tells whether servers must write their checkpoints before more can be kept."""
        return 0 < self._replay_bytes <= self.replay_bytes and self._clock() >= self._save_at

    def put_off_saving(self) -> None:
        """Notes that a server has no room for its checkpoint: pushes are kept meanwhile."""
        self._save_at = self._clock() + _SAVE_AGAIN_S

    def close(self) -> None:
        """Says bye to the servers, and closes; one that may come back is waited for as ever.

        Else it would come back to nobody, and wait for trainers that have long ended.
        """
        try:
            with suppress(JaxfleetError):
                self._save_last()
            self._check_s = _CHECK_BYE_S
            with suppress(JaxfleetError):  # a server that is gone needs no bye
                servers = range(len(self._servers))
                returns_s = self._patience.server_return_s
                limit_s = _BYE_S + (self._patience.lost_after_s + returns_s if returns_s else 0.0)
                self.wait([self.request(server, Kind.BYE) for server in servers], limit_s)
        finally:
            self.abandon()

    def abandon(self, why: str = "") -> None:
        """Closes without a bye: servers will miss this trainer.

        Args:
            why: what its last heartbeat says that it did.
        """
        if self._heartbeat is not None:
            self._heartbeat.close(last=why)
        self._lines.close()

    def _save_last(self) -> None:
        """Lets servers keep what they cannot be brought level with once this trainer left."""
        replays = [(at, known.replay) for at, known in enumerate(self._servers)]
        pushed = [at for at, log in replays if log.until_saved and log.first_step() is not None]
        self.doing("last checkpoint")
        self.wait([self.request(server, Kind.SAVE) for server in pushed])

    def _take(self, server: int, message: Message) -> None:
        self.received_bytes += sum(tensor.array.nbytes for tensor in message.tensors)
        known = self._servers[server]
        if message.kind is Kind.ERROR:
            self._take_error(server, known, message)
            return
        if message.kind is Kind.PENDING:
            self._recovery.send_missing(server, message)
            return
        request = known.waiting.get(message.number)
        if request is not None:  # else it is the answer to what was asked twice
            request.take(message)
            known.clock = clock_of(message, known.clock)
            if request.is_done:
                known.has_answered(request)

    def _take_error(self, server: int, known: KnownServer, message: Message) -> None:
        """Raises a server's error; one that came before, or that only others wait for, is void."""
        number = message.number
        if message.body.get("error") == "stranger" and known.is_open:
            if number not in known.repeated:
                self._recovery.see_stranger(server)
        elif not number and message.body.get("error") == "bad_message" and known.is_open:
            known.damaged += 1  # a frame of which too little arrived to name its request
            if known.damaged > _MOST_DAMAGED:
                raise refused(self.me, server, message)
            self._outbox.check_pending(server)
        elif number not in known.repeated or number in known.waiting:
            if known.waiting.pop(number, None) is not None:
                known.repeated.add(number)
            raise refused(self.me, server, message)

    def _check_pending(self, now: float) -> None:
        """Asks servers for requests whose answers do not come: a connection may have lost them."""
        renewed = self._lines.renewed()
        for server, known in enumerate(self._servers):
            due = known.is_due(now, self._check_s)
            if known.is_open and (due or server in renewed):
                known.check_at_s = now + self._check_s
                self._outbox.check_pending(server)

    def _bound_replay(self) -> None:
        """Forgets the oldest pushes where servers do not apply, or save, what is kept for them."""
        most = _MOST_FULL * self._replay_bytes or _UNAPPLIED_BYTES
        if (excess := self.replay_bytes - most) > 0:
            fullest = max(self._servers, key=lambda known: known.replay.bytes)
            if fullest.replay.shrink(excess) and self._replay_bytes and not self._has_warned:
                self._has_warned = True
                alert(
                    f"{self.me.name} keeps {most} bytes of pushes that servers have no room to "
                    "save, and forgets the oldest: a server that dies now ends the job"
                )

    def _bring_level(self) -> None:
        for server, known in enumerate(self._servers):
            if not (known.is_level or known.is_returning):
                self._recovery.bring_level(server)

    def _look_at_servers(self, requests: Sequence[Request]) -> None:
        """Notes which servers started again; gives up on those that are gone."""
        if self._heartbeat is None:
            return
        limit_s = self._patience.lost_after_s + self._patience.server_return_s
        for server, known in enumerate(self._servers):
            pulse = self._heartbeat.pulse(server)
            known.replay.saved(pulse.saved)
            if pulse.incarnation == known.greeted:
                known.replay.applied(pulse.step)
            if pulse.incarnation and str(pulse.incarnation) not in known.welcomes:
                self._recovery.see_new(server, str(pulse.incarnation))
            elif known.is_open and self._heartbeat.silent_s(server) > limit_s:
                doing, step = pulse.doing, self.step
                raise lost(self.me, server, requests, step=step, limit_s=limit_s, doing=doing)

    def _say_hello_again(self, requests: Sequence[Request]) -> None:
        hellos = [r for r in requests if r.message.kind is Kind.HELLO and not r.is_done]
        if hellos and self._clock() >= self._hello_at:
            self._hello_at = self._clock() + _HELLO_AGAIN_S
            for hello in hellos:
                self._outbox.send(hello.server, hello.message)

    def _late(
        self, requests: Sequence[Request], limit_s: float, error: type[JaxfleetError]
    ) -> JaxfleetError:
        request = next(request for request in requests if not request.is_done)
        beats = self._heartbeat
        pulse = beats.pulse(request.server) if beats is not None else None
        return late(self.me, request, limit_s, error, pulse)

    def _described(self, requests: Sequence[Request]) -> str:
        """Returns what is waited for, for the log."""
        waiting = [request for request in requests if not request.is_done]
        if not waiting:
            return f"{self.me.name} waited at step {self.step}"
        beats, first = self._heartbeat, waiting[0]
        pulse = beats.pulse(first.server) if beats is not None else None
        return waited_for(self.me, first, len(waiting) - 1, pulse)

    def _longest_s(self) -> float:
        # Servers notice first who is missing, and say who it is.
        return self._patience.step_timeout_s * 1.1 + 5 + self._patience.server_return_s
