"""HTTP server of a process's metrics, which Prometheus and `jaxfleet top` ask for them."""

import asyncio
import hmac
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from jaxfleet.errors import ConnectError, StrategyError

T = TypeVar("T")

WATCHED_S = 3.0  # the longest between two scrapes of a client that a process waits for at its end
_GOODBYE_S = 2.0


class Exporter(ABC):
    """A collector for Prometheus's client, which serves what it collects."""

    def __init__(self) -> None:
        self._server: MetricsServer | None = None

    @abstractmethod
    def families(self, core: Any) -> Iterator[Any]:
        """Yields the metrics; `core` is `prometheus_client.metrics_core`."""

    def collect(self) -> Iterator[Any]:
        yield from self.families(prometheus_client().metrics_core)

    def describe(self) -> Iterator[Any]:
        """Yields nothing: the metrics depend on the job."""
        yield from ()

    def start(self, host: str, port: int, token: str | None = None) -> int:
        """Serves metrics in a thread; returns the port.

        Port 0 selects a free one. Requests need the bearer token, if given.
        """
        client = prometheus_client()
        registry = client.CollectorRegistry()
        registry.register(self)
        server = MetricsServer(
            lambda: client.generate_latest(registry),
            content_type=client.CONTENT_TYPE_LATEST,
            token=token,
        )
        found = server.start(host, port)
        self._server = server
        return found

    def wait_for_scrape(self, most_s: float = _GOODBYE_S) -> None:
        """Waits for the next scrape, if somebody watches: otherwise an end looks like a death."""
        if self._server is not None and self._server.scraped_ago_s <= WATCHED_S:
            self._server.wait_for_scrape(most_s)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


_MOST = 32  # connections at a time
_LONGEST_S = 5.0  # per connection, from its first byte to the last
_REQUEST_BYTES = 8192
_START_S = 10.0
_PATHS = frozenset({"/metrics", "/"})


class MetricsServer:
    """Serves a text at `GET /metrics`, in one thread for any number of slow or idle clients.

    Prometheus's own server starts a thread for each connection, so 300 idle connections take 300
    threads. Here one event loop serves all of them: the oldest is closed if there are too many, and
    each has a few seconds (`longest_s`).
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
        self._is_ending = False
        self._asked_at = -math.inf  # when the newest scrape began, answered or not
        self._scrapes: deque[float] = deque(maxlen=_MOST)  # when the newest answered ones began
        self._news = threading.Condition()

    @property
    def scraped_ago_s(self) -> float:
        """Seconds since the last scrape began."""
        return time.monotonic() - self._asked_at

    def wait_for_scrape(self, most_s: float) -> None:
        """Waits until as many scrapes as in the last second, and one at least, have come."""
        now = time.monotonic()
        with self._news:
            wanted = max(1, self._scraped_since(now - 1.0))
            self._news.wait_for(lambda: self._scraped_since(now) >= wanted, most_s)

    def _scraped_since(self, since: float) -> int:
        return sum(began >= since for began in self._scrapes)

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
        """Ends every connection, those too that are just being accepted.

        Nothing is cancelled, and the server is closed last: otherwise asyncio (in Python 3.11)
        drops the socket of an unfinished accept without closing it.
        """
        self._is_ending = True
        for writer in self._open:
            writer.transport.abort()
        me, until = asyncio.current_task(), self._loop.time() + _GOODBYE_S
        while tasks := asyncio.all_tasks() - {me}:
            await asyncio.wait(tasks, timeout=_GOODBYE_S)
            if self._loop.time() > until:
                break  # a client connects again and again
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_ending:
            writer.transport.abort()
            return
        self._open[writer] = None
        if len(self._open) > _MOST:
            next(iter(self._open)).transport.abort()
            del self._open[next(iter(self._open))]
        try:
            async with asyncio.timeout(self._longest_s):
                head = await reader.readuntil(b"\r\n\r\n")
                began = time.monotonic()
                answer, is_scrape = self._answer(head)
                if is_scrape:  # before the client can know: it may be the one that ends this server
                    self._asked_at = began
                writer.write(answer)
                writer.write_eof()
                writer.close()
                await writer.wait_closed()
                if is_scrape:
                    self._note_scrape(began)
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # the client left, was slow, or sent no HTTP
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()  # otherwise unread data would be buffered indefinitely

    def _note_scrape(self, began: float) -> None:
        with self._news:
            self._scrapes.append(began)
            self._news.notify_all()

    def _answer(self, head: bytes) -> tuple[bytes, bool]:
        """Returns the answer, and whether it has the metrics."""
        lines = head.decode("latin-1").split("\r\n")
        method, _, path = lines[0].partition(" ")
        if not self._lets_in(lines[1:]):
            return _response(
                "401 Unauthorized", "text/plain", b"", "WWW-Authenticate: Bearer"
            ), False
        if method != "GET":
            return _response("405 Method Not Allowed", "text/plain", b"", "Allow: GET"), False
        if path.partition(" ")[0].partition("?")[0] not in _PATHS:
            return _response("404 Not Found", "text/plain", b"metrics are at /metrics\n"), False
        return _response("200 OK", self._content_type, self._text()), True

    def _lets_in(self, fields: list[str]) -> bool:
        """Whether the header fields contain the required token, if any."""
        if self._token is None:
            return True
        for line in fields:
            name, _, value = line.partition(":")
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


def prometheus_client() -> Any:
    """Returns Prometheus's client."""
    try:
        import prometheus_client as found  # noqa: PLC0415  # an extra
    except ImportError as error:
        hint = "pip install 'jaxfleet[watch]', or unset JAXFLEET_METRICS_PORT"
        raise StrategyError("metrics need prometheus_client", hint=hint) from error
    return found
