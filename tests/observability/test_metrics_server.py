"""Metrics are served to clients with the token, in one thread, however many or slow they are."""

import gc
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from jaxfleet.errors import ConnectError
from jaxfleet.observability.metrics_server import MetricsServer
from jaxfleet.transport.secret import derive_keys, metrics_token
from tests.transport.test_zmq_authentication import descriptors
from tests.transport.test_zmq_network import SECRET, until


@contextmanager
def serving(
    token: str | None = None, longest_s: float = 5.0
) -> Iterator[tuple[MetricsServer, int]]:
    server = MetricsServer(
        lambda: b"steps 3\n", content_type="text/plain", token=token, longest_s=longest_s
    )
    port = server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        server.close()


def ask(port: int, path: str = "/metrics", method: str = "GET", **fields: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=fields)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_metrics_are_given_to_who_has_the_token() -> None:
    with serving("word") as (_, port):
        assert ask(port, Authorization="Bearer word") == (200, b"steps 3\n")
        assert ask(port, authorization="bearer  word ") == (200, b"steps 3\n")
        for wrong in ({}, {"Authorization": "Bearer wor"}, {"Authorization": "Basic word"},
                      {"Authorization": "Bearer wörd".encode().decode("latin-1")},
                      {"X-Authorization": "Bearer word"}):  # fmt: skip
            assert ask(port, **wrong) == (401, b"")


def test_without_a_token_anybody_of_this_machine_may_ask() -> None:
    with serving() as (_, port):
        assert ask(port) == (200, b"steps 3\n")
        assert ask(port, "/?name[]=steps")[0] == 200
        assert ask(port, "/other")[0] == 404
        assert ask(port, method="POST")[0] == 405


def test_idle_connections_take_no_threads_and_keep_nobody_out() -> None:
    with serving() as (server, port), ExitStack() as stack:
        before = threading.active_count()
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(port) == (200, b"steps 3\n")
        assert threading.active_count() == before
        until(lambda: server.connections <= 32)


def test_a_connection_that_asks_nothing_is_closed_after_a_moment() -> None:
    with (
        serving(longest_s=0.1) as (server, port),
        socket.create_connection(("127.0.0.1", port), timeout=10) as idle,
    ):
        assert idle.recv(1) == b""
        until(lambda: server.connections == 0)


def test_a_request_without_end_is_not_kept() -> None:
    head = b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (64 << 20)
    with serving() as (server, port):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as line,
            pytest.raises(OSError, match=r"(reset|Broken pipe|aborted)"),
        ):
            line.sendall(head)
        until(lambda: server.connections == 0)
        assert ask(port)[0] == 200


def test_who_reads_nothing_of_its_answer_is_closed() -> None:
    text = bytes(32 << 20)  # more than the kernel buffers
    server = MetricsServer(lambda: text, content_type="text/plain", longest_s=1.0)
    port = server.start("127.0.0.1", 0)
    with closing(server), ExitStack() as stack:
        before = descriptors()
        for _ in range(8):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            line.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until(lambda: server.connections == 8)
        until(lambda: descriptors() == before + 8)  # the server's ends


def test_a_scrape_counts_before_its_client_has_the_answer() -> None:
    """Otherwise a process that ends just then does not wait for who watches it."""
    text = bytes(32 << 20)  # more than the kernel buffers, so that the answer is not yet sent
    server = MetricsServer(lambda: text, content_type="text/plain")
    port = server.start("127.0.0.1", 0)
    with closing(server), socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert line.recv(8) == b"HTTP/1.1"
        assert server.scraped_ago_s < 10


def test_connections_that_come_at_the_end_are_closed() -> None:
    """A cancelled accept would leave its socket open, which the collector reports."""
    for _ in range(5):
        with serving() as (server, port), ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            server.close()
    gc.collect()


def test_a_port_that_is_taken_is_named() -> None:
    with (
        serving() as (_, port),
        pytest.raises(ConnectError, match=f"cannot be served at 127.0.0.1:{port}"),
    ):
        MetricsServer(bytes, content_type="text/plain").start("127.0.0.1", port)


def test_the_secret_does_not_follow_from_the_token() -> None:
    token, keys = metrics_token(SECRET), derive_keys(SECRET)
    assert token == metrics_token(SECRET)
    assert token != metrics_token(SECRET[::-1])
    assert SECRET.hex() not in token
    assert keys.server_secret.decode() not in token
