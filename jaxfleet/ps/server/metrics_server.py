"""An HTTP server for `GET /metrics`: one thread, for any number of slow or idle clients.

Prometheus's own server starts a thread for each connection, so 300 idle connections take 300
threads. Here one event loop serves all of them: the oldest is closed if there are too many, and
each has a few seconds.
"""

import asyncio
import hmac
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from jaxfleet.errors import ConnectError

T = TypeVar("T")

_MOST = 32  # connections at a time
_LONGEST_S = 5.0  # per connection, from its first byte to the last
_REQUEST_BYTES = 8192
_START_S = 10.0
_PATHS = frozenset({"/metrics", "/"})


class MetricsServer:
    """Serves a text over HTTP.

    Args:
        longest_s: timeout of a request.
    """

    def __init__(
        self,
        text: Callable[[], bytes],
        *,
        content_type: str,
        token: str | None = None,
        longest_s: float = _LONGEST_S,
    ) -> None:
        self._text, self._content_type = text, content_type
        self._token, self._longest_s = token, longest_s
        self._open: dict[asyncio.StreamWriter, None] = {}  # in order of arrival
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def connections(self) -> int:
        return len(self._open)

    def start(self, host: str, port: int) -> int:
        """Serves in a thread; returns the port."""
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jaxfleet-metrics", daemon=True
        )
        self._thread.start()
        beginning = asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES)
        try:
            self._server = self._wait_for(beginning)
        except OSError as error:
            self.close()
            what = f"metrics cannot be served at {host}:{port}: {error.strerror}"
            raise ConnectError(what, hint="set JAXFLEET_METRICS_PORT to another port") from error
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._wait_for(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_S)
            self._loop.close()
            self._thread = None

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MOST:
            next(iter(self._open)).transport.abort()
            del self._open[next(iter(self._open))]
        try:
            async with asyncio.timeout(self._longest_s):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                writer.write_eof()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # the client left, was slow, or sent no HTTP
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()  # otherwise unread data would be buffered indefinitely

    def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, _, path = lines[0].partition(" ")
        if not self._lets_in(lines[1:]):
            return _response("401 Unauthorized", "text/plain", b"", "WWW-Authenticate: Bearer")
        if method != "GET":
            return _response("405 Method Not Allowed", "text/plain", b"", "Allow: GET")
        if path.partition(" ")[0].partition("?")[0] not in _PATHS:
            return _response("404 Not Found", "text/plain", b"metrics are at /metrics\n")
        return _response("200 OK", self._content_type, self._text())

    def _lets_in(self, fields: list[str]) -> bool:
        """Whether the header fields contain the required token, if any."""
        if self._token is None:
            return True
        for field in fields:
            name, _, value = field.partition(":")
            kind, _, shown = value.strip().partition(" ")
            if name.lower() == "authorization" and kind.lower() == "bearer":
                return hmac.compare_digest(shown.strip().encode(), self._token.encode())
        return False


def _response(status: str, content_type: str, body: bytes, *fields: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *fields,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
