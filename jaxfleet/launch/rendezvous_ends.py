"""The two ends of a rendezvous of launches: the first machine's, and those of the others."""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from jaxfleet.errors import ClosedError, ConnectError, StrategyError
from jaxfleet.launch.job_spec import CollectiveJob
from jaxfleet.launch.rendezvous import Call, Meeting, Rendezvous
from jaxfleet.observability import LongWait
from jaxfleet.transport.messages import Connections, Kind, Listener, Message, Network, Peer
from jaxfleet.transport.secret import read_secret
from jaxfleet.transport.zmq.network import ZmqNetwork

LONGEST_S = 600.0  # for enough machines, or for the first one's answer
_ASK_S = 0.5
_LISTEN_S = 0.2
_CLOSING_S = 5.0


class MachineRendezvous(Protocol):
    """This machine's end."""

    def meet(self, ranks: int, after: int, has_ended: Callable[[float], bool]) -> Meeting | None:
        """Waits for the next start.

        Args:
            ranks: the number of ranks that this machine can have.
            after: the last start that it took part in, -1 for none.
            has_ended: waits up to a number of seconds, and returns whether the job has ended.

        Returns:
            The start, which includes this machine; None if the job has ended.

        Raises:
            ConnectError: too few machines came, or the first one does not answer.
            StrategyError: this machine is not one of the job.
        """
        ...

    def close(self) -> None: ...


def machine_rendezvous(job: CollectiveJob, endpoint: str) -> MachineRendezvous:
    """Returns this machine's end of a rendezvous at the first machine's endpoint."""
    secret = None if job.secret_file is None else read_secret(job.secret_file)
    network = ZmqNetwork(secret=secret, share_memory=False, anywhere=True)
    waiting = Waiting(job.name, job.nodes.own, secrets.token_hex(8))
    if job.nodes.index:
        return Guest(waiting, network, endpoint)
    rendezvous = Rendezvous(job.name, job.nodes.names, job.enough_nodes)
    return Host(waiting, rendezvous, network.listen(endpoint))


@dataclass(frozen=True)
class Waiting:
    """What the calls of one launch have in common."""

    job: str
    machine: str
    session: str

    def call(self, ranks: int, after: int) -> Call:
        return Call(self.job, self.machine, self.session, ranks, after)


class Host:
    """The end on the first machine, whose thread answers the others until it is closed."""

    def __init__(self, waiting: Waiting, rendezvous: Rendezvous, listener: Listener) -> None:
        self._waiting, self._rendezvous, self._listener = waiting, rendezvous, listener
        self._peers: dict[str, Peer] = {}  # of the thread, as the next
        self._announced: Meeting | None = None
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._answer, name="jaxfleet-launches", daemon=True)
        self._thread.start()

    def meet(self, ranks: int, after: int, has_ended: Callable[[float], bool]) -> Meeting | None:
        call, wait = self._waiting.call(ranks, after), LongWait()
        until = time.monotonic() + LONGEST_S
        while True:
            with self._lock:
                found = Meeting.of(self._rendezvous.hear(call, time.monotonic()))
                missing = ", ".join(self._rendezvous.awaited)
            if found is not None:
                self._listener.wake()
                return found
            wait.look(partial("waiting for the launches of {}".format, missing))
            if has_ended(_LISTEN_S):
                return None
            if time.monotonic() > until:
                raise self._too_few(missing)

    def _too_few(self, missing: str) -> ConnectError:
        least, most = self._rendezvous.least, len(self._rendezvous.machines)
        what = f"no {least} of {most} machines came within {LONGEST_S:g} s; missing: {missing}"
        return ConnectError(what, hint="look at their launches; --min-nodes says how many it needs")

    def _answer(self) -> None:
        with suppress(ClosedError):
            while not self._closing.is_set():
                if (arrived := self._listener.receive(_LISTEN_S)) is not None:
                    self._hear(*arrived)
                self._announce()
            self._announce()

    def _hear(self, peer: Peer, message: Message) -> None:
        if (call := Call.of(message.body)) is None:
            return
        with self._lock:
            body = self._rendezvous.hear(call, time.monotonic())
        if "refused" not in body:
            self._listener.trust(peer)
            self._peers[call.machine] = peer
        self._listener.send(peer, Message(Kind.WELCOME, "launch", body=body))

    def _announce(self) -> None:
        """Sends a new decision to all that it concerns."""
        with self._lock:
            meeting = self._rendezvous.meeting
        if meeting is None or meeting is self._announced:
            return
        self._announced = meeting
        for machine, peer in self._peers.items():
            if machine in meeting.ranks:
                self._listener.send(peer, Message(Kind.WELCOME, "launch", body=meeting.plain()))

    def close(self) -> None:
        self._closing.set()
        self._listener.wake()
        self._thread.join(_CLOSING_S)
        self._listener.close()


class Guest:
    """The end on any other machine."""

    def __init__(self, waiting: Waiting, network: Network, endpoint: str) -> None:
        self._waiting, self._endpoint = waiting, endpoint
        self._lines: Connections = network.connect([endpoint])

    def meet(self, ranks: int, after: int, has_ended: Callable[[float], bool]) -> Meeting | None:
        call, wait = self._waiting.call(ranks, after), LongWait()
        until, what = time.monotonic() + LONGEST_S, f"an answer from {self._endpoint}"
        while time.monotonic() < until:
            self._lines.send(0, Message(Kind.HELLO, "launch", body=call.plain()))
            asked_s = time.monotonic()
            while (left_s := asked_s + _ASK_S - time.monotonic()) > 0:
                if (arrived := self._lines.receive(min(left_s, _LISTEN_S))) is None:
                    continue
                until = time.monotonic() + LONGEST_S
                if (refused := arrived[1].body.get("refused")) is not None:
                    hint = "give every launch the same --nodes and --job"
                    raise StrategyError(f"{self._endpoint} refused: {refused}", hint=hint)
                found = Meeting.of(arrived[1].body)
                if found is not None and found.start > after:
                    return found
                missing = arrived[1].body.get("waits")
                if isinstance(missing, list):
                    what = f"the launches of {', '.join(map(str, missing))}"
            wait.look(partial("waiting for {}".format, what))
            if has_ended(0.0):
                return None
        what = f"the first machine did not answer at {self._endpoint} within {LONGEST_S:g} s"
        raise ConnectError(what, hint="does its launch run, with the same secret and --min-nodes?")

    def close(self) -> None:
        self._lines.close()
