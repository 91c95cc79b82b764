"""The shorter way between processes of one machine: a Unix socket beside the TCP port, and memory.

A listener on this machine's own address has both; who finds the Unix socket there takes it. The
same bytes cost the kernel half as much on it (measured on loopback, 7.4 MB each way: 1.1 ms of a
core instead of 2.3). Its name is abstract, so no file is left behind, and as far as the machine's
loopback reaches, so does it. Linux alone has such names.
"""

import os
import socket
import struct
import sys
from pathlib import Path

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


def local_name(host: str, port: int) -> str | None:
    """Returns the name of the Unix socket beside a port, None where there is none."""
    if not sys.platform.startswith("linux") or host not in _LOOPBACK:
        return None
    return f"jaxfleet-{port}-{'6' if ':' in host else '4'}"


def local_address(name: str) -> str:
    """Returns the name as ZeroMQ wants it."""
    return f"ipc://@{name}"


def who_answers(name: str) -> int | None:
    """Returns this user's process that listens on the Unix socket now, 0 where it is out of sight.

    None is an unknown peer, or another user: a listener turns users other than its own away there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(f"\0{name}")
        except OSError:
            return None
        found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    if user != os.getuid():
        return None
    return int(pid) if _is_in_sight(pid) else 0


def _is_in_sight(pid: int) -> bool:
    """Tells whether a number names the same process there and here."""
    try:
        return Path(f"/proc/{pid}/ns/pid").samefile("/proc/self/ns/pid")
    except OSError:
        return False
