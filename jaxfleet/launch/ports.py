"""Ports for servers, held so that two launches at once never give out the same one."""

import socket
import sys
from collections.abc import Sequence

from jaxfleet.errors import StrategyError

LOOPBACK = "127.0.0.1"

# On Linux a port may be bound a second time while nobody listens on the first socket, if both ask
# for that, as ZeroMQ does. So it stays ours for the whole job, also while its server is started
# again. Elsewhere it must be let go for the server to have it.
_HELD_ALONG = sys.platform == "linux"


class Ports:
    """Holds ports on the loopback address.

    Args:
        count: how many.
        first: the first one's number, the others' follow; 0 finds free ones.

    Raises:
        StrategyError: somebody else has one that was asked for by number.
    """

    def __init__(self, count: int, *, first: int = 0) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for at in range(count):
                self._sockets.append(_bound(first + at if first else 0))
        except BaseException:
            self.close()
            raise
        ports = [each.getsockname()[1] for each in self._sockets]
        self.endpoints: Sequence[str] = tuple(f"{LOOPBACK}:{port}" for port in ports)

    def give(self, index: int) -> None:
        """Makes room for the server that is about to listen."""
        if not _HELD_ALONG:
            self._sockets[index].close()

    def close(self) -> None:
        """Lets all go."""
        for each in self._sockets:
            each.close()


def _bound(port: int) -> socket.socket:
    """Returns a socket that has the port and does not listen, so connecting to it is refused."""
    holder = socket.socket()
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, port))
    except OSError as error:
        holder.close()
        what = f"port {port} of {LOOPBACK} cannot be had: {error.strerror}"
        raise StrategyError(
            what, hint="ask for another one, or for none: free ones are found"
        ) from None
    return holder
