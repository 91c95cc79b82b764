"""The network between processes, over ZeroMQ."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import zmq

from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.transport.messages import Limits
from jaxfleet.transport.secret import derive_keys
from jaxfleet.transport.shared_memory import can_share
from jaxfleet.transport.zmq.client import ZmqConnections
from jaxfleet.transport.zmq.server import ZmqListener
from jaxfleet.transport.zmq.sockets import Timing

_LOCALHOST = "127.0.0.1"
_SHORTEST_HANDSHAKE_S = 2.0  # a secret takes several round trips, and a busy listener a while


class ZmqNetwork:
    """Connects trainers and servers that may start in any order.

    Without a secret it listens only on this machine, where any process may connect. With one it
    listens on any address, encrypts all traffic, and ignores peers with another secret or none:
    such a client gets no reply until its own deadline; both ends log it.

    Args:
        limits: maximum message sizes.
        secret: the job's, from `jaxfleet.transport.secret.read_secret`.
        timing: timeouts and intervals.
        share_memory: pass large arrays in shared memory between processes of this machine and user,
            where the system supports it.
        anywhere: listen beyond this machine even without a secret, for public data.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        secret: bytes | None = None,
        timing: Timing | None = None,
        share_memory: bool = True,
        anywhere: bool = False,
    ) -> None:
        self._anywhere = anywhere
        self._reported: set[str] = set()  # shared, so each server is logged once
        self._share_memory = share_memory and can_share()
        self._limits = limits or Limits()
        self._timing = timing or Timing()
        self._keys = None if secret is None else derive_keys(secret)

    def connecting_anew_after(self, silent_s: float, *, doubles: bool = True) -> Self:
        """Returns this network with another limit of silence for the connections of clients.

        Half-open connections, on which data gets lost while both ends seem to be connected, are
        otherwise noticed after 30 s. Nor does a handshake take much longer than that silence: data
        of it may get lost, too.

        Args:
            silent_s: seconds without any message while a client waits for one.
            doubles: wait twice as long each time; not necessary where all messages are short.
        """
        changed = copy(self)
        handshake_s = min(self._timing.handshake_s, max(silent_s, _SHORTEST_HANDSHAKE_S))
        changed._timing = replace(  # noqa: SLF001  a copy of itself
            self._timing, handshake_s=handshake_s, silent_s=silent_s, doubles=doubles
        )
        return changed

    def connect(self, endpoints: Sequence[str]) -> ZmqConnections:
        """Returns connections to servers, which need not be running yet.

        Raises:
            StrategyError: an endpoint is not `host:port`.
        """
        addresses = [_address(*_host_and_port(endpoint)) for endpoint in endpoints]
        return ZmqConnections(
            addresses,
            limits=self._limits,
            timing=self._timing,
            keys=self._keys,
            share_memory=self._share_memory,
            reported=self._reported,
        )

    def listen(self, endpoint: str) -> ZmqListener:
        """Returns a listener; port 0 selects a free one.

        Raises:
            ConnectError: the port is taken or may not be bound.
            StrategyError: the endpoint is not `host:port`, or reaches beyond this machine without a
                secret.
        """
        host, port = _host_and_port(endpoint)
        number = _resolve(host)
        guarded = self._keys is not None or self._anywhere
        if not guarded and not ipaddress.ip_address(number).is_loopback:
            what = f"{endpoint} can be reached from other machines, and the job has no secret"
            hint = "give the job a secret from a file, or listen on 127.0.0.1"
            raise StrategyError(what, hint=hint)
        try:
            return ZmqListener(
                _address(number, port),
                host=host,
                limits=self._limits,
                timing=self._timing,
                keys=self._keys,
                share_memory=self._share_memory,
            )
        except zmq.ZMQError as error:
            raise _refused(endpoint, error) from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        what = f"'{endpoint}' is not an endpoint"
        raise StrategyError(what, hint="write host:port, such as 127.0.0.1:6174 or [::1]:6174")
    return host, int(port)


def _address(host: str, port: int) -> str:
    # Servers bind the only address of `localhost` that every machine has.
    name = _LOCALHOST if host == "localhost" else host
    return f"tcp://[{name}]:{port}" if ":" in name and name[0] != "[" else f"tcp://{name}:{port}"


def _resolve(host: str) -> str:
    if host == "localhost":
        return _LOCALHOST
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConnectError(f"the host '{host}' is not known: {error}") from error


def _refused(endpoint: str, error: zmq.ZMQError) -> ConnectError:
    hints = {
        errno.EADDRINUSE: "another process listens there; take another port, or 0 for a free one",
        errno.EACCES: "ports below 1024 are the system's; take a higher one",
        errno.EADDRNOTAVAIL: "the address is not one of this machine's",
        errno.ENODEV: "the address is not one of this machine's",
    }
    hint = hints.get(error.errno or 0)
    return ConnectError(f"cannot listen at {endpoint}: {error.strerror}", hint=hint)
