"""A trainer's end: numbered requests to all servers, waited for together, sent again when due.

One thread uses it. Requests return at once; `wait` receives until they are answered, hands arrays
to their sinks as they come, and notices servers that fail, go, or have started again.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.errors import (
    CheckpointError,
    ConnectError,
    JaxfleetError,
    PeerLostError,
    ProgramError,
)
from jaxfleet.ps.heartbeat import Heartbeat
from jaxfleet.ps.known_server import KnownServer, StartedAgainError
from jaxfleet.ps.messages import PROTOCOL, Kind, Message, Plain, Tensor
from jaxfleet.ps.network import Lines
from jaxfleet.ps.options import Patience
from jaxfleet.ps.replay import ReplayLog
from jaxfleet.ps.requests import Request

_ERRORS: Mapping[str, type[JaxfleetError]] = {
    "peer_lost": PeerLostError,
    "timeout": PeerLostError,
    "checkpoint": CheckpointError,
}
_POLL_S = 0.25  # how often a wait looks at heartbeats


@dataclass(frozen=True)
class Membership:
    """Who a trainer is, and what the job runs.

    Attributes:
        job: the job's name.
        trainer: which trainer this is.
        trainers: how many there are.
        endpoints: of the servers.
        program: the hash of what all trainers run.
        programs: each server's program as text, with the values of its constants.
        session: tells this process from another that takes its place.
    """

    job: str
    trainer: int
    trainers: int
    endpoints: tuple[str, ...]
    program: str
    programs: Sequence[tuple[str, Mapping[str, np.ndarray]]] = field(repr=False)
    session: str = field(default_factory=lambda: secrets.token_hex(8))


class Client:
    """A trainer's lines to the servers of its job.

    Args:
        lines: to all servers.
        me: who this is.
        patience: deadlines.
        heartbeat: knows which servers live; without one, only deadlines count.
        replay_bytes: how much to keep of what was pushed, to bring a server level again.
        clock: the time in seconds.
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
    ) -> None:
        self.me = me
        self.step = 0
        self.sent_bytes = self.received_bytes = 0
        self._lines, self._patience, self._clock = lines, patience, clock
        self._heartbeat = heartbeat
        self._name = f"trainer {me.trainer}"
        self._servers = [KnownServer(ReplayLog(replay_bytes)) for _ in me.endpoints]

    def open(self) -> int:
        """Says hello to all servers, and gives them their programs where they have none.

        Returns:
            The last step that they have applied; -1 where they have no state yet.

        Raises:
            ConnectError: a server does not answer.
            ProgramError: a server refuses this trainer.
        """
        hellos = [self._hello(server) for server in range(len(self._servers))]
        self.wait(hellos, self._patience.connect_s, ConnectError)
        for server, hello in enumerate(hellos):
            assert hello.answer is not None
            self._servers[server].welcome(hello.answer)
        steps = [server.step for server in self._servers]
        if len({max(step, 0) for step in steps}) > 1:
            what = f"the servers go on from steps {', '.join(map(str, steps))}, which differ"
            hint = "give them empty folders for checkpoints, and restore a checkpoint of the job"
            raise ProgramError(what, hint=hint)
        if self.me.trainer == 0:
            self.wait([self._define(server) for server in range(len(self._servers))])
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
        sink: Callable[[Tensor], None] | None = None,
    ) -> Request:
        """Sends a request, and returns it for `wait`."""
        message = self._message(server, kind, step, body or {}, tuple(tensors))
        found = Request(server, message, set(wants), sink)
        known = self._servers[server]
        known.waiting[message.number] = found
        if kind is not Kind.ASSIGN or message.body.get("replace"):
            known.replay.add_together(message, self.step)
        self._send(server, message)
        return found

    def push(self, server: int, tensors: Iterable[Tensor]) -> None:
        """Sends gradients of the present step; nothing answers."""
        message = self._message(server, Kind.PUSH, None, {}, tuple(tensors))
        known = self._servers[server]
        known.pushed = max(known.pushed, message.step)
        known.replay.add(message)
        self._send(server, message)

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
        limit = timeout_s if timeout_s is not None else self._longest_s()
        deadline = self._clock() + limit
        while not all(request.is_done for request in requests):
            left = deadline - self._clock()
            if left <= 0:
                raise self._late(requests, limit, error)
            received = self._lines.receive(min(left, _POLL_S))
            if received is not None:
                self._take(*received)
            else:
                self._look_at_servers(requests)
            for server, known in enumerate(self._servers):
                if not (known.is_level or known.is_returning):
                    self._bring_level(server)

    def forget_saved(self, server: int, step: int) -> None:
        """Forgets what was kept for a server until its checkpoint after a step."""
        self._servers[server].replay.forget(step)

    @property
    def is_replay_full(self) -> bool:
        """Tells whether servers must write their checkpoints before more can be kept."""
        return any(server.replay.is_full for server in self._servers)

    def close(self) -> None:
        """Says bye to the servers that still listen, and closes."""
        try:
            with suppress(JaxfleetError):
                self._save_last()
            with suppress(JaxfleetError):  # a server that is gone needs no bye
                servers = range(len(self._servers))
                self.wait([self.request(server, Kind.BYE) for server in servers], timeout_s=2.0)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes without a word: servers will miss this trainer."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._lines.close()

    def _save_last(self) -> None:
        """Lets servers keep what they cannot be brought level with once this trainer left."""
        pushed = [at for at, known in enumerate(self._servers) if known.replay.first_step()]
        self.doing("last checkpoint")
        self.wait([self.request(server, Kind.SAVE) for server in pushed])

    def _message(
        self,
        server: int,
        kind: Kind,
        step: int | None,
        body: Mapping[str, Plain],
        tensors: tuple[Tensor, ...],
    ) -> Message:
        known = self._servers[server]
        known.number += 1
        at = self.step if step is None else step
        return Message(kind, self._name, at, known.number, body, tensors)

    def _send(self, server: int, message: Message) -> None:
        self.sent_bytes += sum(tensor.array.nbytes for tensor in message.tensors)
        self._lines.send(server, message)

    def _hello(self, server: int) -> Request:
        me = self.me
        body: dict[str, Plain] = {
            "protocol": PROTOCOL,
            "job": me.job,
            "trainer": me.trainer,
            "trainers": me.trainers,
            "servers": list(me.endpoints),
            "program": me.program,
            "session": me.session,
            "lost_after_s": self._patience.lost_after_s,
            "step_timeout_s": self._patience.step_timeout_s,
        }
        return self.request(server, Kind.HELLO, body=body)

    def _define(self, server: int) -> Request:
        text, constants = self.me.programs[server]
        tensors = [Tensor(name, value) for name, value in constants.items()]
        return self.request(server, Kind.DEFINE, body={"program": text}, tensors=tensors)

    def _take(self, server: int, message: Message) -> None:
        self.received_bytes += sum(tensor.array.nbytes for tensor in message.tensors)
        known = self._servers[server]
        request = known.waiting.get(message.number)
        if message.kind is Kind.ERROR and message.number not in known.repeated:
            self._take_error(server, message)
        elif request is not None:  # else it is the answer to what was asked twice
            request.take(message)
            if request.is_done:
                known.has_answered(request)

    def _take_error(self, server: int, message: Message) -> None:
        known = self._servers[server]
        if message.body.get("error") != "stranger" or not known.is_open:
            self._raise(server, message)
        if known.is_returning and not known.is_greeted:
            return  # it says so of what it was sent before the hello
        if known.is_returning:
            raise StartedAgainError(server)
        known.is_level = False

    def _raise(self, server: int, message: Message) -> None:
        body, where = message.body, self._server_name(server)
        what = f"{body.get('what', 'no reason given')} (said {where})"
        hint = str(body["hint"]) if body.get("hint") else None
        raise _ERRORS.get(str(body.get("error")), ProgramError)(what, hint=hint)

    def _server_name(self, server: int) -> str:
        return f"server {server} at {self.me.endpoints[server]}"

    def _late(
        self, requests: Sequence[Request], limit_s: float, error: type[JaxfleetError]
    ) -> JaxfleetError:
        request = next(request for request in requests if not request.is_done)
        where = self._server_name(request.server)
        what = (
            f"{self._name} waited {limit_s:.0f} s at step {request.message.step} for {request} "
            f"from {where}{self._last_heard(request.server)}"
        )
        hint = "start the servers, with the same endpoints and secret" if error is ConnectError \
            else "see what that server, and the trainers it waits for, are doing"  # fmt: skip
        return error(what, hint=hint)

    def _last_heard(self, server: int) -> str:
        if self._heartbeat is None:
            return ""
        pulse = self._heartbeat.pulse(server)
        if pulse.last_heard_s is None:
            return ", which has never sent a heartbeat"
        return f"; its last heartbeat said '{pulse.doing}'"

    def _look_at_servers(self, requests: Sequence[Request]) -> None:
        """Notes which servers started again; gives up on those that are gone."""
        if self._heartbeat is None:
            return
        for server, known in enumerate(self._servers):
            pulse = self._heartbeat.pulse(server)
            known.replay.forget(pulse.saved)
            if pulse.incarnation and str(pulse.incarnation) not in known.welcomes:
                self._see_new(server, str(pulse.incarnation))
            elif known.is_open and self._heartbeat.silent_s(server) > self._limit_s():
                raise self._lost(server, requests, pulse.doing)

    def _see_new(self, server: int, incarnation: str) -> None:
        known = self._servers[server]
        if known.is_open and not known.is_returning:
            known.is_level = False
        elif known.greeted in ("", incarnation):
            known.greeted = incarnation  # the hello that is under way is for this one
        elif known.is_open:
            raise StartedAgainError(server)
        else:
            known.greeted = incarnation
            for request in known.waiting.values():
                self._send(server, request.message)

    def _lost(self, server: int, requests: Sequence[Request], doing: str) -> PeerLostError:
        waits = [r for r in requests if r.server == server and not r.is_done]
        for_what = f" while {self._name} waited for {waits[0]}" if waits else ""
        what = (
            f"{self._server_name(server)} was lost at step {self.step}{for_what}: no "
            f"heartbeat for {self._limit_s():.1f} s; its last said '{doing}'"
        )
        return PeerLostError(what, hint="look at that server's log; start the job again")

    def _limit_s(self) -> float:
        return self._patience.lost_after_s + self._patience.server_return_s

    def _longest_s(self) -> float:
        # Servers notice first who is missing, and say who it is.
        return self._patience.step_timeout_s * 1.1 + 5 + self._patience.server_return_s

    def _bring_level(self, server: int) -> None:
        """Sends a server that started again what came after its checkpoint."""
        known = self._servers[server]
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

    def _return(self, server: int, waiting: Sequence[Request]) -> None:
        known = self._servers[server]
        known.greeted, known.is_greeted = "", False
        hello = self._hello(server)
        self.wait([hello])
        assert hello.answer is not None
        known.welcome(hello.answer)
        known.is_greeted = True
        lost = known.is_behind()
        if lost is not None:
            what = f"{self._server_name(server)} cannot go on at step {self.step}: {lost}"
            hint = "let servers keep checkpoints; raise strategy.replay_bytes; start the job again"
            raise PeerLostError(what, hint=hint)
        if self.me.trainer == 0 and not hello.answer.body.get("defined"):
            self.wait([self._define(server)])
        self._replay(server, waiting)

    def _replay(self, server: int, waiting: Sequence[Request]) -> None:
        known = self._servers[server]
        own = {request.message.number for request in waiting}
        for message in known.replay.together(self.step):
            if message.number not in own:
                known.repeated.add(message.number)
                self._send(server, message)
        for step, pushes in known.replay.after(known.step):
            for message in pushes:
                self._send(server, message)
            if step < self.step:
                self.wait([self.request(server, Kind.PULL, step=step, body={"names": []})])
        for request in waiting:
            if not request.is_done:
                self._send(server, request.message)
