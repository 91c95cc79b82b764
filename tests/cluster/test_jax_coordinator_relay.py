"""The relay forwards jax's connections to its coordinator, and no other user's."""

import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxfleet.cluster.jax_coordinator_relay import Relay, peer_user

SAYS = """
import encodings.idna, os, socket, sys
os.setuid(65534)
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as line:
    try:
        line.sendall(b"in your name")
        if sys.argv[2] == "half-closed":
            line.shutdown(socket.SHUT_WR)
        print(line.recv(100))
    except OSError as error:
        print(b"")
"""


def coordinator() -> tuple[socket.socket, list[bytes]]:
    """Returns an echoing listener, and the bytes it received."""
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


def peer_user_once_half_closed(line: socket.socket) -> int | None:
    """Calls `peer_user` after the other end has shut down its sending side."""
    waits = select.poll()
    waits.register(line, select.POLLRDHUP)
    assert waits.poll(20_000)
    return peer_user(line)


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
@pytest.mark.parametrize("connection", ["open", "half-closed"])
def test_a_relay_carries_nothing_of_another_user(
    connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connection == "half-closed":
        monkeypatch.setattr(
            "jaxfleet.cluster.jax_coordinator_relay.peer_user", peer_user_once_half_closed
        )
    listener, came = coordinator()
    with listener:
        relay = Relay("127.0.0.1", listener.getsockname()[1], connect_s=10.0)
        words = [sys.executable, "-I", "-S", "-c", SAYS, str(port(relay.address)), connection]
        done = subprocess.run(words, capture_output=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (0, b"b''\n"), done.stderr
    assert came == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists connections")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_user_of_a_connection_is_known_until_the_other_end_is_closed(
    family: socket.AddressFamily,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.socket(family)
        mapped = "::ffff:" if family is socket.AF_INET6 else ""  # as gRPC connects
        client.connect((f"{mapped}127.0.0.1", listener.getsockname()[1]))
        line, _ = listener.accept()
        with line:
            assert peer_user(line) == os.getuid()
            client.shutdown(socket.SHUT_WR)
            assert peer_user_once_half_closed(line) == os.getuid()
            client.close()  # the kernel still lists it, as root's
            assert peer_user(line) == -1


def test_a_system_that_lists_no_connections_is_distinguished_from_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = (tmp_path / "tcp", tmp_path / "tcp6")
    monkeypatch.setattr("jaxfleet.cluster.jax_coordinator_relay._TABLES", tables)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        assert peer_user(client) is None
        tables[0].write_text("  sl  local_address rem_address\n")
        assert peer_user(client) == -1
