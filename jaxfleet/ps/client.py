"""A trainer's end: numbered requests to all servers, waited for together, sent again when due.

One thread uses it. Requests return at once; `wait` receives until they are answered, hands arrays
to their sinks as they come, and notices servers that fail, go, or have started again.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.errors import ConnectError, JaxfleetError, PeerLostError, ProgramError
from jaxfleet.ps.heartbeat import Heartbeat
from jaxfleet.ps.messages import PROTOCOL, Kind, Message, Plain, Tensor
from jaxfleet.ps.network import Lines
from jaxfleet.ps.options import Patience
from jaxfleet.ps.replay import ReplayLog
from jaxfleet.ps.requests import Request

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


@dataclass
class _Server:
    """What a client knows of one server."""

    replay: ReplayLog
    number: int = 0
    incarnation: str = ""
    step: int = -1
    waiting: dict[int, Request] = field(default_factory=dict)


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
        self._servers = [_Server(ReplayLog(replay_bytes)) for _ in me.endpoints]

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
            self._welcomed(server, hello)
        if self.me.trainer == 0:
            self.wait([self._define(server) for server in range(len(self._servers))])
        return min(server.step for server in self._servers)

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
        self._servers[server].waiting[message.number] = found
        self._send(server, message)
        return found

    def push(self, server: int, tensors: Iterable[Tensor]) -> None:
        """Sends gradients of the present step; nothing answers."""
        message = self._message(server, Kind.PUSH, None, {}, tuple(tensors))
        self._servers[server].replay.add(message)
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
        limit = timeout_s if timeout_s is not None else self._patience.step_timeout_s * 1.1 + 5
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

    def forget_saved(self, server: int, step: int) -> None:
        """Forgets what was kept for a server until its checkpoint after a step."""
        self._servers[server].replay.forget(step)

    @property
    def is_replay_full(self) -> bool:
        """Tells whether servers must write their checkpoints before more can be kept."""
        return any(server.replay.is_full for server in self._servers)

    def close(self) -> None:
        """Says bye to the servers that still listen, and closes."""
        byes = [self.request(server, Kind.BYE) for server in range(len(self._servers))]
        try:
            self.wait(byes, timeout_s=2.0)
        except JaxfleetError:
            pass  # a server that is gone needs no bye
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes without a word: servers will miss this trainer."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._lines.close()

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
        }
        return self.request(server, Kind.HELLO, body=body)

    def _welcomed(self, server: int, hello: Request) -> None:
        assert hello.answer is not None
        body, known = hello.answer.body, self._servers[server]
        known.incarnation = str(body.get("incarnation", ""))
        step = body.get("step", -1)
        known.step = step if isinstance(step, int) else -1

    def _define(self, server: int) -> Request:
        text, constants = self.me.programs[server]
        tensors = [Tensor(name, value) for name, value in constants.items()]
        return self.request(server, Kind.DEFINE, body={"program": text}, tensors=tensors)

    def _take(self, server: int, message: Message) -> None:
        self.received_bytes += sum(tensor.array.nbytes for tensor in message.tensors)
        known = self._servers[server]
        request = known.waiting.get(message.number)
        if message.kind is Kind.ERROR:
            self._raise(server, message)
        if request is None:
            return  # the answer to what was asked twice
        request.take(message)
        if request.is_done:
            del known.waiting[message.number]

    def _raise(self, server: int, message: Message) -> None:
        body, where = message.body, self._server_name(server)
        what = f"{body.get('what', 'no reason given')} (said {where})"
        hint = str(body["hint"]) if body.get("hint") else None
        lost = body.get("error") in {"peer_lost", "timeout"}
        raise (PeerLostError if lost else ProgramError)(what, hint=hint)

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
        """Brings servers level that started again; gives up on those that are gone."""
        if self._heartbeat is None:
            return
        for server, known in enumerate(self._servers):
            pulse = self._heartbeat.pulse(server)
            known.replay.forget(pulse.saved)
            if known.incarnation and pulse.incarnation not in ("", None, known.incarnation):
                self._bring_level(server)
            elif known.incarnation and self._heartbeat.silent_s(server) > self._limit_s():
                waits = [r for r in requests if r.server == server and not r.is_done]
                for_what = f" while {self._name} waited for {waits[0]}" if waits else ""
                what = (
                    f"{self._server_name(server)} was lost at step {self.step}{for_what}: no "
                    f"heartbeat for {self._limit_s():.1f} s; its last said '{pulse.doing}'"
                )
                raise PeerLostError(what, hint="look at that server's log; start the job again")

    def _limit_s(self) -> float:
        return self._patience.lost_after_s + self._patience.server_return_s

    def _bring_level(self, server: int) -> None:
        """Sends a server that started again what came after its checkpoint."""
        known, waiting = self._servers[server], dict(self._servers[server].waiting)
        hello = self._hello(server)
        self.wait([hello])
        self._welcomed(server, hello)
        first = known.replay.first_step()
        if known.step < 0 or (first is not None and first > known.step + 1):
            what = (
                f"{self._server_name(server)} came back at step {known.step}, and {self._name} "
                f"has kept pushes only from step {first}"
            )
            raise PeerLostError(what, hint="raise strategy.replay_bytes, or restore a checkpoint")
        for step, pushes in known.replay.after(known.step):
            for message in pushes:
                self._send(server, message)
            if step < self.step:
                self.wait([self.request(server, Kind.PULL, step=step, body={"names": []})])
        for request in waiting.values():
            self._send(server, request.message)
