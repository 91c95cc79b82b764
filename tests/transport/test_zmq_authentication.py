"""Connections without the secret are few and small, and do not disturb those with it."""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jaxfleet.transport.zmq.authentication import AdmissionControl, AdmissionLimits
from jaxfleet.transport.zmq.network import ZmqNetwork
from tests.transport.test_zmq_network import ANYWHERE, SECRET, ask, echoing, lines_to, until

counted = pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not count bytes")
LIMITS = AdmissionLimits(connections=6, of_an_address=4, received_bytes=1000, longest_s=5.0)


@contextmanager
def connected(*, addresses: tuple[str, ...]) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Yields pairs of a client and the listener's accepted socket, from these addresses."""
    with ExitStack() as stack, socket.create_server((ANYWHERE.rpartition(":")[0], 0)) as server:
        pairs = []
        for address in addresses:
            client = socket.create_connection(server.getsockname(), source_address=(address, 0))
            accepted, _ = server.accept()
            pairs.append((stack.enter_context(client), stack.enter_context(accepted)))
        yield pairs


def descriptors() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def is_cut(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_the_oldest_of_an_address_is_cut_where_it_has_too_many() -> None:
    door = AdmissionControl(LIMITS)
    with connected(addresses=("127.0.0.2", *["127.0.0.1"] * 6)) as pairs:
        for _, accepted in pairs:
            door.accepted(accepted.fileno())
        assert [is_cut(client) for client, _ in pairs] == [False, True, True, *[False] * 4]
        assert (len(door), door.cut) == (5, 2)
        door.close()


def test_the_oldest_of_all_is_cut_where_there_are_too_many() -> None:
    door = AdmissionControl(LIMITS)
    addresses = tuple(f"127.0.0.{at}" for at in range(1, 9))
    with connected(addresses=addresses) as pairs:
        for _, accepted in pairs:
            door.accepted(accepted.fileno())
        assert [is_cut(client) for client, _ in pairs] == [True, True, *[False] * 6]
        door.close()


@counted
def test_who_sends_much_before_it_is_known_is_cut_and_who_was_answered_is_not() -> None:
    door = AdmissionControl(LIMITS)
    with connected(addresses=("127.0.0.1",) * 3) as pairs:
        (silent, _), (loud, _), (known, answers) = pairs
        for _, accepted in pairs:
            door.accepted(accepted.fileno())
        answers.sendall(b"x" * 100)
        known.recv(100, socket.MSG_WAITALL)
        known.sendall(b"x" * 2000)
        loud.sendall(b"x" * 2000)
        until(lambda: door.look() or door.cut > 0)  # type: ignore[func-returns-value]
        assert is_cut(loud)
        assert not is_cut(silent)
        assert not is_cut(known)
        assert len(door) == 1
        door.close()


@counted
def test_without_a_secret_a_connection_counts_until_it_is_known_to_be_of_the_job() -> None:
    now = 0.0
    door = AdmissionControl(LIMITS, by_handshake=False, clock=lambda: now)
    with connected(addresses=("127.0.0.1",) * 3) as pairs:
        (idle, _), (known, answers), (loud, _) = pairs
        for _, accepted in pairs:
            door.accepted(accepted.fileno())
        answers.sendall(b"x" * 100)
        known.recv(100, socket.MSG_WAITALL)
        loud.sendall(b"x" * 2000)
        until(lambda: door.look() or door.cut > 0)  # type: ignore[func-returns-value]
        assert is_cut(loud)
        assert len(door) == 2  # an answer proves nothing
        door.left(pairs[1][1].fileno())
        now = 6.0
        door.look()
        assert is_cut(idle)
        assert not is_cut(known)
        assert (len(door), door.cut) == (0, 2)


def test_a_door_forgets_what_ended_and_what_stays_long() -> None:
    now = 0.0
    door = AdmissionControl(LIMITS, clock=lambda: now)
    with connected(addresses=("127.0.0.1",) * 2) as pairs:
        for _, accepted in pairs:
            door.accepted(accepted.fileno())
        door.left(pairs[0][1].fileno())
        assert len(door) == 1
        now = 6.0
        door.look()
        assert (len(door), door.cut) == (0, 0)
        assert not is_cut(pairs[1][0])


def test_a_number_that_is_no_socket_s_is_nobody(tmp_path: Path) -> None:
    door = AdmissionControl(LIMITS)
    with (tmp_path / "file").open("wb") as file:
        before = descriptors()
        door.accepted(file.fileno())
        door.accepted(10_000)
        assert descriptors() == before
    assert len(door) == 0


@counted
def test_idle_connections_without_the_secret_take_few_descriptors_and_disturb_nobody() -> None:
    network = ZmqNetwork(secret=SECRET)
    with echoing(network) as listener, lines_to(network, listener.endpoint) as lines:
        assert ask(lines) is not None
        host, _, port = listener.endpoint.rpartition(":")
        with ExitStack() as stack:
            strangers = [
                stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(343)
            ]
            before = descriptors()
            until(lambda: listener.cut >= 343 - 16)
            until(lambda: descriptors() <= before)
            with lines_to(network, listener.endpoint) as others:
                assert ask(others, 2) is not None
            assert ask(lines, 3) is not None
            cut = sum(is_cut(one) for one in strangers)
            assert 343 - 16 <= cut <= 343
            assert descriptors() < 343 + 150


def pour(line: socket.socket) -> None:
    """Sends slowly, for a while."""
    for _ in range(2000):
        line.sendall(bytes(1 << 12))
        time.sleep(0.01)


@counted
def test_a_large_first_frame_is_cut_before_it_is_held() -> None:
    network = ZmqNetwork(secret=SECRET)
    with echoing(network) as listener, lines_to(network, listener.endpoint) as lines:
        host, _, port = listener.endpoint.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
            stranger.sendall(greeting)
            frame = b"\x06" + (15 << 20).to_bytes(8, "big")  # a long command, as a handshake's
            stranger.sendall(frame)
            with pytest.raises(OSError, match=r"(reset|Broken pipe|aborted)"):
                pour(stranger)
        assert listener.cut >= 1
        assert ask(lines) is not None
