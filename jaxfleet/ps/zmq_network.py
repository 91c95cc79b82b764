"""Carries messages between processes, over ZeroMQ."""

import errno
import ipaddress
import socket
from collections.abc import Sequence

import zmq

from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.ps.limits import Limits
from jaxfleet.ps.secret import derive_keys
from jaxfleet.ps.shared_arena import can_share
from jaxfleet.ps.zmq_ends import Timing
from jaxfleet.ps.zmq_lines import ZmqLines
from jaxfleet.ps.zmq_listener import ZmqListener

_LOCALHOST = "127.0.0.1"


class ZmqNetwork:
    """Connects trainers and servers that may start in any order.

    Without a secret it listens on this machine only, where everyone who can run a process may
    connect. With one it listens anywhere, encrypts all that it sends, and answers nobody who has
    another or none: such a client hears nothing until its own deadline; both ends log it.

    Args:
        limits: how much a message may hold.
        secret: the job's, from `jaxfleet.ps.secret.read_secret`.
        timing: how soon things are noticed.
        share_memory: let processes of this machine and user find large arrays in shared memory,
            where the system can do that.
        anywhere: listen beyond this machine without a secret too, for what anybody may know.
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
        self._complaints: set[str] = set()  # one log for all lines to a server
        self._share_memory = share_memory and can_share()
        self._limits = limits or Limits()
        self._timing = timing or Timing()
        self._keys = None if secret is None else derive_keys(secret)

    def connect(self, endpoints: Sequence[str]) -> ZmqLines:
        """Returns lines to servers, which need not be there yet.

        Raises:
            StrategyError: an endpoint is no `host:port`.
        """
        addresses = [_address(*_host_and_port(endpoint)) for endpoint in endpoints]
        return ZmqLines(
            addresses,
            limits=self._limits,
            timing=self._timing,
            keys=self._keys,
            share_memory=self._share_memory,
            complaints=self._complaints,
        )

    def listen(self, endpoint: str) -> ZmqListener:
        """Returns a server's end; port 0 takes a free one.

        Raises:
            ConnectError: the port is taken, or may not be bound.
            StrategyError: an endpoint is no `host:port`, or reaches beyond this machine although
                there is no secret.
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
        what = f"'{endpoint}' is no endpoint"
        raise StrategyError(what, hint="write host:port, such as 127.0.0.1:6174 or [::1]:6174")
    return host, int(port)


def _address(host: str, port: int) -> str:
    # Servers bind the one address of `localhost` that every machine has.
    name = _LOCALHOST if host == "localhost" else host
    return (
        f"tcp://[{name}]:{port}"
        if ":" in name.strip("[]") and name[0] != "["
        else f"tcp://{name}:{port}"
    )


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
