"""A scrape bounds what a process that is no server can do to the one that asks it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from jaxfleet.board import Watch
from jaxfleet.board.watch import Has
from jaxfleet.errors import ConnectError
from jaxfleet.observability import Board, scrape

pytest.importorskip("prometheus_client", reason="needs the extra `watch`")


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Serves an answer to every connection; yields the address and the requests."""
    requests: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    requests.append(connection.recv(4096))
                    answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)


def page(text: str) -> Callable[[socket.socket], None]:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n"
    return lambda connection: connection.sendall((head + text).encode())


@pytest.mark.grid
@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_byte_at_a_time_is_no_answer_in_time(head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(60):
            connection.sendall(b"a")
            time.sleep(0.1)

    with answering(drip) as (address, _):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="did not answer within 2 s"):
            scrape(address)
        assert time.monotonic() - began < 4.0


def test_a_redirect_does_not_get_the_token() -> None:
    with answering(page("jaxfleet_server_step 1\n")) as (other, requests):
        to = f"HTTP/1.1 302 Found\r\nLocation: http://{other}/metrics\r\nContent-Length: 0\r\n\r\n"
        redirecting = answering(lambda connection: connection.sendall(to.encode()))
        what = "is not a server or rank of jaxfleet's"
        with redirecting as (address, _), pytest.raises(ConnectError, match=what):
            scrape(address, "the token")
        assert requests == []


def test_the_board_goes_on_with_huge_values_and_trainers_without_a_step() -> None:
    text = """\
jaxfleet_server_step 1
jaxfleet_table_rows{table="a"} 1e308
jaxfleet_table_rows{table="b"} 1e308
jaxfleet_trainer_resident_bytes{trainer="3"} 5
"""
    with answering(page(text)) as (address, _):
        watch = Watch(Board([address]))
        watch.look()
    data, _ = watch.updates(Has())
    json.dumps(data, allow_nan=False)
    assert [(one["number"], one["step"]) for one in data["trainers"]] == [(3, 0)]
