"""Authenticates the peers of a listener, and limits connections that are not authenticated."""

import threading
import time
from collections import deque

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from jaxfleet.ps.doorway import DoorLimits, Doorway
from jaxfleet.ps.secret import Keys
from jaxfleet.watch.notices import alert

_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks
_EVENTS = "inproc://jaxfleet.door"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LOG_AGAIN_S = 60.0
_SHOWN = 3  # addresses
_MOST_TRUSTED = 1024  # at a time
_LOOK_MS = 50  # between two looks at connections that have proved nothing


class Door:
    """Lets in peers with the job's secret, or all that speak as ZeroMQ does since 2013.

    A peer of an older protocol that says its name while the socket closes would end this process
    (libzmq 4.3.5, zmtp_engine.cpp:422); libzmq turns it away where it has to ask. The thread is the
    door's own: the one that serves may be busy for longer than a handshake waits.

    Args:
        context: of the listener.
        router: its socket, not bound yet.
        keys: of the job's secret.
        limits: how much connections may hold before they have proved that they have it.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        keys: Keys | None,
        limits: DoorLimits,
    ) -> None:
        self._doorway = Doorway(limits, keys is not None)
        self._trusted = deque[int](maxlen=_MOST_TRUSTED)
        self._where, self._refused, self._log_at = "", 0, 0.0
        self._wanted = [b"NULL"]
        if keys is not None:
            self._wanted = [b"CURVE", zmq.utils.z85.decode(keys.client_public)]
        router.setsockopt(zmq.ZAP_DOMAIN, b"jaxfleet")
        self._asked = context.socket(zmq.REP)
        self._asked.setsockopt(zmq.LINGER, 0)
        self._asked.bind(_ZAP)
        router.monitor(_EVENTS, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room
        self._events.connect(_EVENTS)
        threading.Thread(target=self._run, name="jaxfleet-door", daemon=True).start()

    def listens_at(self, endpoint: str) -> None:
        """Notes where the listener is, for the log."""
        self._where = endpoint

    def trust(self, descriptor: int) -> None:
        """Notes that who is at the other end of a connection takes part in the job."""
        if self._doorway.may_hold(descriptor):
            self._trusted.append(descriptor)

    @property
    def cut(self) -> int:
        """How many connections were cut before they proved anything."""
        return self._doorway.cut

    def _run(self) -> None:
        """Answers and watches until the context ends."""
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(_LOOK_MS if len(self._doorway) else None))
                if self._asked in ready:
                    self._answer()
                if self._events in ready:
                    event = recv_monitor_message(self._events)
                    self._note(event["event"], event["value"])
                while self._trusted:
                    self._doorway.left(self._trusted.popleft())
                self._doorway.look()
        except zmq.ZMQError:
            self._doorway.close()
            self._asked.close()
            self._events.close()

    def _answer(self) -> None:
        """Answers a question of ZeroMQ's (RFC 27)."""
        version, number, _, _, _, *shown = self._asked.recv_multipart()
        status = (
            (b"200", b"OK", b"jaxfleet")
            if shown == self._wanted
            else (b"400", b"not this job's", b"")
        )
        self._asked.send_multipart([version, number, *status, b""])

    def _note(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._doorway.accepted(descriptor)
        elif event & _FAILED:
            self._log_refused()
        else:
            self._doorway.left(descriptor)

    def _log_refused(self) -> None:
        """Logs now and then that a peer ended its handshake without the secret."""
        self._refused += 1
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + _LOG_AGAIN_S
            peers = ", ".join(self._doorway.addresses[:_SHOWN]) or "this machine"
            alert(
                f"the listener at {self._where} refused a peer from {peers}, whose secret is not "
                f"this job's ({self._refused} connections so far): give both the same secret file"
            )
