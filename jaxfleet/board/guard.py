"""Guard of the board's page: who may ask for it, and what a browser may do with it."""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from jaxfleet.errors import StrategyError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_ASKS = b"This board has a token: open the address that `jaxfleet top --web` printed.\n"


def page_token(metrics_token: str) -> str:
    """Derives the token of the page, which does not open the metrics themselves."""
    return _derived(metrics_token, b"jaxfleet board")


def check_host(host: str, token: str | None) -> None:
    """Prevents showing a job to a network by mistake.

    Raises:
        StrategyError: other machines can reach the host, and there is no token.
    """
    if token is None and not _is_loopback(host):
        what = f"--host {host} would show the job to every machine that reaches it"
        hint = "give --secret-file FILE, from which the page has a token; or leave --host out"
        raise StrategyError(what, hint=hint)


class Guard:
    """Lets requests through that name this machine and have the token.

    A page of another site cannot read the board: its requests carry no cookie, and if it has its
    own name point at this machine (DNS rebinding), they name that site as their host. Browsers send
    a cookie to every port of a host, where other users may listen: that of the token is for a path
    that they cannot guess.

    Args:
        app: answers the requests that pass.
        host: the address that is served.
        port: its port.
        token: that requests must have, if any: in a cookie, which `/?token=...` sets, or as a
            bearer token.
    """

    def __init__(self, app: App, *, host: str, port: int, token: str | None = None) -> None:
        self._app, self._token = app, token
        self._hosts = {"localhost", host.lower(), socket.gethostname().lower()}
        self._cookie = f"jaxfleet_board_{port}"
        self._folder = "" if token is None else f"/{_derived(token, b'path of the page')[:32]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in
                   scope["headers"]}  # fmt: skip
        if not self._is_here(headers.get("host", "")):
            await _answer(send, 421, b"This board has another name.\n")
        elif scope["method"] not in {"GET", "HEAD"}:
            await _answer(send, 405, b"", Allow="GET, HEAD")
        elif self._is_right(_asked_token(scope)) and scope["path"] == "/":
            place = f"{self._folder}/"
            cookie = f"{self._cookie}={self._token}; Path={place}; HttpOnly; SameSite=Strict"
            await _answer(send, 303, b"", Location=place, **{"Set-Cookie": cookie})
        elif self._token is None or self._has_token(headers):
            path = scope["path"]
            if path.startswith(f"{self._folder}/"):
                path = path.removeprefix(self._folder)
            await self._app({**scope, "path": path}, receive, _with_headers(send))
        else:
            await _answer(send, 401, _ASKS, **{"WWW-Authenticate": "Bearer"})

    def _is_here(self, host: str) -> bool:
        """Whether a Host header names this machine: by an address, or by a name of its own."""
        name, _, port = host.rpartition(":")
        if not name or (port and not port.isdigit()):
            name = host
        name = name.strip("[]").lower()
        return name in self._hosts or _address(name) is not None

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._is_right(shown.strip())
        # SimpleCookie drops all cookies if one is malformed, as another port's may be.
        cookies = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        return any(name == self._cookie and self._is_right(value) for name, _, value in cookies)

    def _is_right(self, shown: str) -> bool:
        if self._token is None:
            return False
        return hmac.compare_digest(shown.encode("utf-8", "replace"), self._token.encode())


def _derived(token: str, purpose: bytes) -> str:
    return hmac.new(token.encode(), purpose, hashlib.sha256).hexdigest()


def _asked_token(scope: Scope) -> str:
    query: bytes = scope["query_string"]
    return parse_qs(query.decode("latin-1")).get("token", [""])[0]


def _with_headers(send: Send) -> Send:
    async def sends(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_encoded(_HEADERS)]
        await send(message)

    return sends


async def _answer(send: Send, status: int, body: bytes, **fields: str) -> None:
    headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
    start = _encoded({**headers, **fields, **_HEADERS})
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    found = _address(host)
    return host == "localhost" if found is None else found.is_loopback
