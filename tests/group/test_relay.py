"""A relay carries jax's lines to its coordinator, and nobody else's."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from jaxfleet.group.peer_user import peer_user
from jaxfleet.group.relay import Relay

SAYS = """
import encodings.idna, os, socket, sys
os.setuid(65534)
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as line:
    try:
        line.sendall(b"in your name")
        print(line.recv(100))
    except OSError as error:
        print(b"")
"""


def coordinator() -> tuple[socket.socket, list[bytes]]:
    """Returns a listener that answers what it gets by the same, and what it got."""
    listener, came = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                came.append(line.recv(100))
                line.sendall(came[-1])

    threading.Thread(target=serve, daemon=True).start()
    return listener, came


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_relay_carries_what_its_own_user_says() -> None:
    listener, came = coordinator()
    with listener:
        relay = Relay("127.0.0.1", listener.getsockname()[1], connect_s=10.0)
        with socket.create_connection(("127.0.0.1", port(relay.address)), timeout=20) as line:
            line.sendall(b"hello")
            assert line.recv(100) == b"hello"
    assert came == [b"hello"]


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_relay_carries_nothing_of_another_user() -> None:
    listener, came = coordinator()
    with listener:
        relay = Relay("127.0.0.1", listener.getsockname()[1], connect_s=10.0)
        words = [sys.executable, "-I", "-S", "-c", SAYS, str(port(relay.address))]
        done = subprocess.run(words, capture_output=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (0, b"b''\n"), done.stderr
    assert came == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists connections")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_user_of_a_connection_is_known_while_both_ends_are_open(
    family: socket.AddressFamily,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.socket(family)
        mapped = "::ffff:" if family is socket.AF_INET6 else ""  # as gRPC connects
        client.connect((f"{mapped}127.0.0.1", listener.getsockname()[1]))
        line, _ = listener.accept()
        with line:
            assert peer_user(line) == os.getuid()
            client.close()
            assert peer_user(line) in {None, -1}
