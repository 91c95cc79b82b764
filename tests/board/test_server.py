"""The board's page is for this machine, or for whoever has the token."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest

from jaxfleet.board import Watch, check_host, page_token
from jaxfleet.board.connections import bounded, timed
from jaxfleet.board.guard import Guard, Send
from jaxfleet.board.server import _place, make_app, serve_board
from jaxfleet.board.watch import Has
from jaxfleet.cli import main
from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.observability import Board
from tests.board.test_history import A, sample
from tests.transport.test_zmq_network import until

pytest.importorskip("starlette", reason="needs the extra `board`")
pytest.importorskip("uvicorn", reason="needs the extra `board`")

TOKEN = page_token("of metrics")
Response = tuple[int, dict[str, str], bytes]


def watch() -> Watch:
    return Watch(Board([A], look_at=lambda _: sample()))


def ask(
    path: str, *, token: str | None = None, method: str = "GET", query: str = "", **fields: str
) -> Response:
    """Asks the board, without a network."""
    guard = Guard(make_app(watch(), every_s=1.0), host="127.0.0.1", port=80, token=token)
    headers = [(b"host", b"127.0.0.1:80")] if "host" not in fields else []
    headers += [(name.encode(), value.encode()) for name, value in fields.items()]
    scope = {
        "type": "http", "method": method, "path": path, "headers": headers, "root_path": "",
        "query_string": query.encode(), "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b""}

    async def send(message: object) -> None:
        sent.append(message)  # type: ignore[arg-type]

    asyncio.run(guard(scope, receive, send))
    start, *bodies = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}  # type: ignore[attr-defined]
    return int(str(start["status"])), found, b"".join(bytes(x.get("body", b"")) for x in bodies)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["", "page.js", "page.css", "uplot.js", "uplot.css"])
def test_the_page_comes_from_this_machine_alone(name: str) -> None:
    status, headers, body = ask(f"/{name}")
    assert (status, len(body) > 500) == (200, True)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    if not name.startswith("uplot"):
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_another_name_is_refused(host: str) -> None:
    assert ask("/", host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost:80", "127.0.0.1", "[::1]:80"])
def test_a_name_of_this_machine_is_served(host: str) -> None:
    assert ask("/", host=host)[0] == 200


def test_a_token_is_asked_for_and_kept_in_a_cookie() -> None:
    for path in ("/", "/stream", "/page.js"):
        assert ask(path, token=TOKEN)[0] == 401
    assert ask("/", token=TOKEN, query="token=wrong")[0] == 401
    assert ask("/", token=TOKEN, cookie="jaxfleet_board_80=wrong")[0] == 401
    status, headers, _ = ask("/", token=TOKEN, query=f"token={TOKEN}")
    kept, place = headers["set-cookie"], headers["location"]
    assert status == 303
    assert "HttpOnly" in kept
    assert "SameSite=Strict" in kept
    for path in ("", "page.js"):
        assert ask(f"{place}{path}", token=TOKEN, cookie=kept.partition(";")[0])[0] == 200
    assert ask(place, token=TOKEN)[0] == 401
    assert ask("/", token=TOKEN, authorization=f"Bearer {TOKEN}")[0] == 200


def test_browsers_send_the_cookie_to_no_page_of_another_port() -> None:
    _, headers, _ = ask("/", token=TOKEN, query=f"token={TOKEN}")
    place = headers["location"]
    assert f"; Path={place};" in headers["set-cookie"]
    assert len(place) > 30  # not to be guessed
    assert place.strip("/") not in TOKEN


def test_a_malformed_cookie_of_another_port_does_not_hide_the_token() -> None:
    cookies = f'theme={{"dark":1}}; jaxfleet_board_80={TOKEN}'
    assert ask("/", token=TOKEN, cookie=cookies)[0] == 200


def test_an_id_of_other_digits_begins_anew() -> None:
    found = watch()
    assert _place(f"{id(found):x}-\u00b2-1-1", found) == Has()
    assert _place(f"{id(found):x}-{'9' * 10_000}-1-1", found) == Has()
    found.look()
    assert _place(f"{id(found):x}-1-0-2", found) == Has(1, 0, 2)
    assert _place(f"{id(found):x}-9-9-9999", found) == Has(1, 0, len(found.history.series))


@contextmanager
def served() -> Iterator[int]:
    """Serves the board in a process; yields its port."""
    script = "from tests.board.test_server import *; serve_one()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def serve_one() -> None:
    def tell(address: str) -> None:
        print(address.strip("/").rpartition(":")[2], flush=True)  # noqa: T201

    serve_board(watch(), host="127.0.0.1", port=0, on_listening=tell)


def asked(stack: ExitStack, port: int, path: str = "/") -> tuple[socket.socket, int]:
    """Asks for a path; returns the open connection and the status."""
    line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
    line.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return line, int(line.recv(12).split()[1])


@pytest.mark.grid
def test_idle_connections_and_streams_keep_nobody_out() -> None:
    with served() as port, ExitStack() as stack:
        idle = []
        for number in range(300):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            if number % 3 == 0:
                line.sendall(b"GET / HTTP/1.1\r\nHost: 127.")  # and never the rest
            idle.append(line)
        assert asked(stack, port)[1] == 200
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""  # the oldest was cut
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)  # the newest was not
        streams = [asked(stack, port, "/stream") for _ in range(20)]
        assert [status for _, status in streams] == [200] * 16 + [503] * 4
        assert asked(stack, port)[1] == 200
        streams[0][0].close()
        until(lambda: asked(stack, port, "/stream")[1] == 200)  # another page takes its place


def test_a_connection_that_asks_nothing_is_closed_after_a_while() -> None:
    async def connects() -> bytes:
        loop = asyncio.get_running_loop()
        uvicorn = pytest.importorskip("uvicorn")
        from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: PLC0415  # an extra

        config = uvicorn.Config(Guard(make_app(watch(), every_s=1.0), host="h", port=1))
        config.load()
        state = uvicorn.server.ServerState()
        kind = bounded(H11Protocol, request_s=0.1)
        make = partial(kind, config=config, server_state=state, app_state={})
        server = await loop.create_server(make, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        found = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        server.close()
        return found

    assert asyncio.run(connects()) == b""


def test_a_client_that_takes_nothing_is_left() -> None:
    async def app(_: object, __: object, send: Send) -> None:
        await send({"type": "http.response.body"})

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(timed(app, send_s=0.05)({"type": "http"}, never, never))  # type: ignore[arg-type]


def test_only_reading_is_allowed() -> None:
    assert ask("/", method="POST")[0] == 405
    assert ask("/../../etc/passwd")[0] == 404


def test_a_page_for_other_machines_needs_a_token() -> None:
    check_host("127.0.0.1", None)
    check_host("::1", None)
    check_host("0.0.0.0", TOKEN)  # noqa: S104
    for host in ("0.0.0.0", "10.0.0.7", "a.example"):  # noqa: S104
        with pytest.raises(StrategyError, match="would show the job"):
            check_host(host, None)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConnectError, match=f"cannot be served at 127.0.0.1:{port}"):
            serve_board(watch(), host="127.0.0.1", port=port)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--web", "--once"], "--once and --web exclude each other"),
        (["--web", "70000"], "--web is 70000"),
        (["--web", "--every=0.1"], "at least 0.5 with --web"),
        (["--web", "--host=0.0.0.0"], "would show the job to every machine"),
        (["--host=127.0.0.1"], "--host is the address of the page"),
        (["--wait=-1"], "--wait is -1"),
    ],
)
def test_words_that_do_not_fit_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "1", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_the_extra_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxfleet.board.server.find_spec", lambda _: None)
    assert main(["top", "1", "--web"]) == 2
    assert "pip install 'jaxfleet[board]'" in capsys.readouterr().err
