"""Finds ports that nobody listens on."""

import socket

from jaxfleet.errors import StrategyError

_LAST = 65535


def free_port(first: int, step: int) -> int:
    """Returns the first port of `first`, `first + step`, ... that is free on this machine.

    Raises:
        StrategyError: none is.
    """
    for port in range(first, _LAST + 1, step):
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("", port))
            except OSError:
                continue
            return port
    raise StrategyError(f"no port of this machine from {first} on, by {step}, is free")
