"""Attacks by another user of the machine; a separate program, run as `nobody` if possible.

    python stranger.py ENDPOINT FOLDER [SECONDS]

It has only the job's endpoint, which any user can list. Its results are printed as JSON. With
SECONDS it keeps its connections for that time, and prints `ready` first.
"""

import encodings.idna  # noqa: F401  # sockets import it late, when `nobody` may not read it
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgpack
import zmq

from jaxfleet.transport.messages import PROTOCOL

NOBODY = 65534
IDLE = 343  # connections, which ended jobs whose user may have 400 descriptors
LARGE = 15 << 20  # bytes of a frame within ZeroMQ's own limit
WAIT_MS = 400
LONGEST_S = 8.0  # less than ZeroMQ's limit for a handshake
OF_AN_ADDRESS = 16
OF_AN_ADDRESS_WITHOUT_SECRET = 64
PROGRAM = "program p {pserver_id=0}\n  block 0\n    rpc\n      listen_and_serv()"


def header(kind: str, number: int, body: dict[str, Any]) -> bytes:
    """Returns a message of a trainer without arrays."""
    fields = {"kind": kind, "sender": "trainer 0", "step": 0, "number": number, "body": body}
    packed: bytes = msgpack.packb({"v": PROTOCOL, "tensors": [], **fields})
    return packed


def messages(endpoint: str, folder: Path) -> list[bytes]:
    """Returns messages that once took over a job: both trainers' places, its program, its files."""
    job = {"protocol": PROTOCOL, "job": "j", "trainers": 2, "program": "ab", "servers": [endpoint]}
    hellos = [header("hello", n + 1, {**job, "trainer": n}) for n in range(2)]
    taken = header("define", 3, {"program": PROGRAM})
    files = [header(kind, 4, {"path": str(folder / "taken")}) for kind in ("save", "load")]
    return [*hellos, taken, *files, header("stats", 5, {}), header("heartbeat", 6, {})]


def answers(address: str, sent: Sequence[bytes], keys: tuple[bytes, bytes, bytes] | None) -> int:
    """Sends messages on a connection; returns the number of answers of any kind."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            line.setsockopt(zmq.CURVE_SERVERKEY, keys[0])
            line.setsockopt(zmq.CURVE_PUBLICKEY, keys[1])
            line.setsockopt(zmq.CURVE_SECRETKEY, keys[2])
        line.connect(address)
        for message in sent:
            line.send(message)
        came = 0
        while line.poll(WAIT_MS):
            line.recv_multipart()
            came += 1
        return came


def idle(endpoint: str, stack: ExitStack) -> list[socket.socket]:
    """Opens silent connections."""
    host, _, port = endpoint.rpartition(":")
    made = []
    for _ in range(IDLE):
        with suppress(OSError):
            made.append(stack.enter_context(socket.create_connection((host, int(port)))))
    return made


def is_open(line: socket.socket) -> bool:
    """Whether the other end has not closed a connection."""
    line.setblocking(False)
    try:
        while line.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def left(made: Sequence[socket.socket], most: int) -> int:
    """Returns the number of open connections once it is at most `most`, or on a timeout."""
    until = time.monotonic() + LONGEST_S
    while (count := sum(map(is_open, made))) > most and time.monotonic() < until:
        time.sleep(0.1)
    return count


NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
TYPE = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
READY = bytes([4, 6 + len(TYPE)]) + b"\x05READY" + TYPE


def shaken(endpoint: str, stack: ExitStack, count: int) -> list[socket.socket]:
    """Opens connections that do ZeroMQ's handshake without a secret, and then stay silent."""
    host, _, port = endpoint.rpartition(":")
    made = []
    for _ in range(count):
        with suppress(OSError):
            line = stack.enter_context(socket.create_connection((host, int(port))))
            line.sendall(NULL + READY)
            made.append(line)
    return made


def frame_poured(endpoint: str) -> int:
    """Returns the number of bytes of a message that a connection accepted before a hello."""
    took = 0
    with ExitStack() as stack, suppress(OSError):
        (line,) = shaken(endpoint, stack, 1)
        line.sendall(b"\x02" + LARGE.to_bytes(8, "big"))
        for _ in range(LARGE >> 16):
            line.sendall(bytes(1 << 16))
            took += 1 << 16
            time.sleep(0.005)
    return took


def poured(endpoint: str) -> int:
    """Returns the number of bytes of a handshake's frame that a connection accepted."""
    host, _, port = endpoint.rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    took = 0
    with suppress(OSError), socket.create_connection((host, int(port))) as line:
        line.sendall(greeting + b"\x06" + LARGE.to_bytes(8, "big"))
        for _ in range(LARGE >> 12):
            line.sendall(bytes(1 << 12))
            took += 1 << 12
            time.sleep(0.01)
    return took


def readable(folder: Path) -> list[str]:
    """Returns the launches' secrets that this user can read, or whose folder it can list."""
    found = []
    for one in folder.glob("jaxfleet-*"):
        with suppress(OSError):
            found += [str(path) for path in one.iterdir()]
        with suppress(OSError):
            found.append((one / "secret").read_text())
    return found


def against_no_secret(endpoint: str) -> None:
    """Attacks a server that was started with `--insecure`, and prints the results."""
    with ExitStack() as stack:
        kept = shaken(endpoint, stack, IDLE)
        found: dict[str, Any] = {"user": os.getuid(), "opened": len(kept)}
        found["left"] = left(kept, OF_AN_ADDRESS_WITHOUT_SECRET)
        found["poured"] = frame_poured(endpoint)
        body = {"protocol": PROTOCOL, "job": "another", "trainers": 2, "servers": [endpoint]}
        hellos = [header("hello", at, {**body, "trainer": at % 2}) for at in range(200)]
        found["answers"] = answers(f"tcp://{endpoint}", hellos, None)
        print(json.dumps(found))  # noqa: T201


def main(endpoint: str, folder: Path, seconds: float) -> None:
    """Attacks a server in every way, and prints the results."""
    sent = messages(endpoint, folder)
    public, secret = zmq.curve_keypair()
    port = endpoint.rpartition(":")[2]
    found: dict[str, Any] = {"user": os.getuid()}
    found["in clear"] = answers(f"tcp://{endpoint}", sent, None)
    found["by CURVE"] = answers(f"tcp://{endpoint}", sent, (public, public, secret))
    found["by a Unix socket"] = answers(f"ipc://@jaxfleet-{port}-4", sent, None)
    found["poured"] = poured(endpoint)
    with ExitStack() as stack:
        kept = idle(endpoint, stack)
        found["opened"], found["left"] = len(kept), left(kept, OF_AN_ADDRESS)
        if seconds:
            print("ready", flush=True)  # noqa: T201
            time.sleep(seconds)
    found["secrets"] = readable(Path(os.environ.get("TMPDIR", "/tmp")))  # noqa: S108
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if sys.argv[2] == "--insecure":
        against_no_secret(sys.argv[1])
        sys.exit()
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
