"""Ports of processes, held so that two launches at once never give out the same one."""

import errno
import socket
import sys
from collections.abc import Sequence

from jaxfleet.errors import StrategyError
from jaxfleet.launch.nodes import LOOPBACK

# On Linux a port may be bound a second time while nobody listens on the first socket, if both ask
# for that, as ZeroMQ and gRPC do. So it stays ours for the whole job, also while its server is
# started again. Elsewhere it must be let go for the process to have it.
_HELD_ALONG = sys.platform == "linux"


class Ports:
    """Holds ports of this machine.

    Args:
        count: how many.
        first: the first one's number, the others' follow; 0 finds free ones.
        host: this machine's name among those of a job. One that is no address of a network card
            here, as where another machine forwards to this one, has its ports unheld.

    Raises:
        StrategyError: somebody else has one that was asked for by number.
    """

    def __init__(self, count: int, *, first: int = 0, host: str = LOOPBACK) -> None:
        self._sockets: list[socket.socket] = []
        address = _address(host)
        try:
            for at in range(count):
                self._sockets.append(_bound(address, first + at if first else 0))
        except BaseException:
            self.close()
            raise
        ports = [first + at if first else self._port(at) for at in range(count)]
        self.endpoints: Sequence[str] = tuple(f"{host}:{port}" for port in ports)

    def _port(self, at: int) -> int:
        port: int = self._sockets[at].getsockname()[1]
        return port

    def give(self, index: int) -> None:
        """Makes room for the process that is about to listen."""
        if not _HELD_ALONG:
            self._sockets[index].close()

    def close(self) -> None:
        """Lets all go."""
        for each in self._sockets:
            each.close()


def _address(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Returns how a socket is bound to a host, None where its name says nothing here."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    family, _, _, _, (address, *_) = found[0]
    return family, str(address)


def _bound(address: tuple[socket.AddressFamily, str] | None, port: int) -> socket.socket:
    """Returns a socket that has the port and does not listen, so connecting to it is refused."""
    holder = socket.socket(socket.AF_INET if address is None else address[0])
    if address is None:
        return holder
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address[1], port))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return holder
        holder.close()
        what = f"port {port} of {address[1]} cannot be had: {error.strerror}"
        raise StrategyError(
            what, hint="ask for another one, or for none: free ones are found"
        ) from None
    return holder
