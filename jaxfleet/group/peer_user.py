"""The user that owns the other end of a loopback connection."""

import socket
import struct
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = "0000000000000000FFFF0000"  # before an IPv4 address that an IPv6 socket has, as gRPC's
_LOCAL, _REMOTE, _USER, _INODE = 1, 2, 7, 9  # columns
_CLOSED = "0"  # the inode of an end without an owner, whose user is given as root


def peer_user(line: socket.socket) -> int | None:
    """Returns the id of the user; None if the system does not list its connections.

    The kernel lists both ends of a loopback connection with their owners, whether or not an end
    has shut down its sending side. The result is -1 if the other end is not listed with an owner:
    it has been closed, or belongs to another machine.

    Raises:
        OSError: the connection has ended.
    """
    here, there = _name(line.getsockname()), _name(line.getpeername())
    tables = [rows for table in _TABLES if (rows := _rows(table)) is not None]
    if not tables:
        return None
    users = {
        (row[_LOCAL].removeprefix(_MAPPED), row[_REMOTE].removeprefix(_MAPPED)): int(row[_USER])
        for row in (each.split() for rows in tables for each in rows)
        if row[_INODE] != _CLOSED
    }
    return users.get((there, here), -1)


def _rows(table: Path) -> list[str] | None:
    """Returns the table's rows without its heading; None if it cannot be read."""
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return None


def _name(address: tuple[str, int]) -> str:
    """Returns an address as the kernel's table has it: in the machine's own order of bytes."""
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"
