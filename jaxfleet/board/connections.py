"""Limits on the connections to the board: their number, and the time without a request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from jaxfleet.board.guard import App, Receive, Scope, Send

MOST_CONNECTIONS = 64
REQUEST_S = 10.0  # from its begin until a connection has sent a request
SEND_S = 20.0  # until a client has taken what waits for it


def bounded(
    base: Any, *, most: int = MOST_CONNECTIONS, request_s: float = REQUEST_S
) -> Callable[..., asyncio.Protocol]:
    """Returns uvicorn's protocol with limits: uvicorn keeps a connection that asks nothing.

    Beyond `most`, the oldest connection without a request in progress is cut; the newest, if all
    have one. Streams are such requests, and limited in number by the application.

    Args:
        base: `uvicorn.protocols.http.h11_impl.H11Protocol`.
        most: number of connections.
        request_s: seconds until a connection must have sent a request.
    """
    opened: dict[Any, None] = {}  # in order of arrival

    class Bounded(base):  # type: ignore[misc]  # the library is an extra
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            opened[self] = None
            self._asks_until = self.loop.call_later(request_s, self._cut_without_request)
            if len(opened) > most:
                idle = next((one for one in opened if not one.is_busy), self)
                idle.transport.abort()
                opened.pop(idle)

        def connection_lost(self, exc: Exception | None) -> None:
            opened.pop(self, None)
            self._asks_until.cancel()
            super().connection_lost(exc)

        @property
        def is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _cut_without_request(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    return Bounded


def timed(app: App, *, send_s: float = SEND_S) -> App:
    """Returns the application with a limit on each wait for a client that reads nothing."""

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        async def sends(message: Any) -> None:
            sending: Awaitable[None] = send(message)
            await asyncio.wait_for(sending, send_s)

        await app(scope, receive, sends if scope["type"] == "http" else send)

    return answers
