"""The user that owns the other end of a loopback connection."""

import socket
import struct
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = "0000000000000000FFFF0000"  # before an IPv4 address that an IPv6 socket has, as gRPC's
_LOCAL, _REMOTE, _STATE, _USER = 1, 2, 3, 7  # columns
_ESTABLISHED = "01"


def peer_user(line: socket.socket) -> int | None:
    """Returns the id of the user; None if the system does not list its connections.

    The kernel lists both ends of a loopback connection with their owners. The result is -1 if the
    other end is not listed: it has been closed, or belongs to another machine.

    Raises:
        OSError: the connection has ended.
    """
    here, there = _name(line.getsockname()), _name(line.getpeername())
    rows = [row.split() for table in _TABLES for row in _rows(table)]
    users = {
        (row[_LOCAL].removeprefix(_MAPPED), row[_REMOTE].removeprefix(_MAPPED)): int(row[_USER])
        for row in rows
        if row[_STATE] == _ESTABLISHED
    }
    if (here, there) not in users:
        return None
    return users.get((there, here), -1)


def _rows(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return []


def _name(address: tuple[str, int]) -> str:
    """Returns an address as the kernel's table has it: in the machine's own order of bytes."""
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"
