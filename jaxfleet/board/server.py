"""Server of the board: a page, and a stream of new samples."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxfleet.board.connections import bounded, timed
from jaxfleet.board.guard import App, Guard
from jaxfleet.board.watch import Has, Watch
from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.observability.notices import alert

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGE = ("page.html", "page.css", "page.js", "page_charts.js", "page_model.js", "page_tables.js")
_MOST_STREAMS = 16
_LONGEST_ID = 60  # characters
_AGAIN_MS = 1000  # until a browser connects again
_GOODBYE_S = 1  # for open streams when the board ends


def serve_board(
    watch: Watch,
    *,
    host: str,
    port: int,
    token: str | None = None,
    every_s: float = 1.0,
    on_listening: Callable[[str], None] = lambda _: None,
) -> None:
    """Serves the board until it is interrupted.

    Args:
        watch: of the job.
        host: the address to serve at.
        port: its port; 0 selects a free one.
        token: that a browser must have, if any.
        every_s: seconds between two looks at the job.
        on_listening: called with the page's address.

    Raises:
        ConnectError: the address is taken or is not one of this machine.
        StrategyError: the extra `board` is not installed.
    """
    libraries = _libraries()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        what = f"the board cannot be served at {host}:{port}: {error.strerror}"
        raise ConnectError(what, hint="give --web another port") from error
    with listener:
        port = listener.getsockname()[1]
        guarded = Guard(make_app(watch, every_s=every_s), host=host, port=port, token=token)
        config = libraries.uvicorn.Config(
            timed(guarded),
            http=bounded(libraries.H11Protocol),
            log_level="critical",
            timeout_graceful_shutdown=_GOODBYE_S,
            server_header=False,
            ws="none",
        )
        shown = f"[{host}]" if ":" in host else host
        query = "" if token is None else f"?token={token}"
        on_listening(f"http://{shown}:{port}/{query}")
        with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
            libraries.uvicorn.Server(config).run(sockets=[listener])


def make_app(watch: Watch, *, every_s: float) -> App:
    """Returns the application, without its guard; it looks at the job while it runs."""
    libraries = _libraries()
    parts = _parts(libraries.uplot)
    looked = asyncio.Condition()
    streams: set[object] = set()

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(_look_always(watch, every_s, looked))
        yield
        task.cancel()

    async def part(request: Any) -> Any:
        content, kind = parts[request.url.path.removeprefix("/") or "page.html"]
        return libraries.Response(content, media_type=kind)

    async def stream(request: Any) -> Any:
        if len(streams) >= _MOST_STREAMS:
            return libraries.Response("too many pages are open\n", 503, media_type="text/plain")
        last = request.headers.get("last-event-id", "")
        return libraries.StreamingResponse(updates(last), media_type="text/event-stream")

    async def updates(last: str) -> AsyncIterator[bytes]:
        has = _place(last, watch)
        me = object()
        streams.add(me)
        try:
            yield b"retry: %d\n\n" % _AGAIN_MS
            while True:
                data, has = watch.updates(has)
                text = json.dumps(data, separators=(",", ":"), allow_nan=False)
                place = f"{has.rows}-{has.events}-{has.series}"
                yield f"id: {_run(watch)}-{place}\ndata: {text}\n\n".encode()
                if data["more"]:
                    continue
                async with looked:
                    while watch.history.count <= has.rows:
                        await looked.wait()
        finally:
            streams.discard(me)

    route = libraries.Route

    async def icon(_: Any) -> Any:
        return libraries.Response(status_code=204)  # browsers ask for one

    routes = [route(f"/{name}", part) for name in ("", *parts)]
    routes.append(route("/favicon.ico", icon))
    return libraries.Starlette(routes=[*routes, route("/stream", stream)], lifespan=life)  # type: ignore[no-any-return]


async def _look_always(watch: Watch, every_s: float, looked: asyncio.Condition) -> None:
    """Looks at the job, and wakes the streams after each look."""
    clock = asyncio.get_running_loop().time
    due = clock()
    while True:
        try:
            await asyncio.to_thread(watch.look)
        except Exception as error:  # noqa: BLE001  # a server's odd answer must not end the board
            alert(f"the board could not look at the job: {type(error).__name__}: {error}")
        async with looked:
            looked.notify_all()
        due = max(due + every_s, clock())
        await asyncio.sleep(due - clock())


def _run(watch: Watch) -> str:
    """Distinguishes this board from another that a page was connected to before."""
    return f"{id(watch):x}"


def _place(last: str, watch: Watch) -> Has:
    """Returns what a page has, from its last event's id."""
    run, *numbers = last[:_LONGEST_ID].split("-")
    are_numbers = len(numbers) == 3 and all(one.isdecimal() for one in numbers)
    if run != _run(watch) or not are_numbers:
        return Has()
    rows, events, series = map(int, numbers)
    known = len(watch.history.series)
    return Has(min(rows, watch.history.count), min(events, watch.event_count), min(series, known))


def _parts(uplot: Path) -> dict[str, tuple[bytes, str]]:
    """Returns the files of the page, with their types."""
    own = {name: (files("jaxfleet.board") / name).read_bytes() for name in _PAGE}
    library = {"uplot.js": uplot / "uPlot.iife.js", "uplot.css": uplot / "uPlot.min.css"}
    found = {**own, **{name: path.read_bytes() for name, path in library.items()}}
    return {name: (content, _TYPES[Path(name).suffix]) for name, content in found.items()}


def check_libraries() -> None:
    """Checks that the extra is installed.

    Raises:
        StrategyError: it is not.
    """
    _libraries()


def _libraries() -> SimpleNamespace:
    """Returns what the extra `board` brings; uPlot as the folder of its files."""
    try:
        import uvicorn  # noqa: PLC0415  # an extra
        from starlette import applications, responses, routing  # noqa: PLC0415
        from uvicorn.protocols.http import h11_impl  # noqa: PLC0415
    except ImportError as error:
        raise _missing() from error
    # Its Python part, which is not needed, would import IPython.
    spec = find_spec("uplot")
    if spec is None or not spec.submodule_search_locations:
        raise _missing()
    return SimpleNamespace(
        uvicorn=uvicorn,
        H11Protocol=h11_impl.H11Protocol,
        Starlette=applications.Starlette,
        Route=routing.Route,
        Response=responses.Response,
        StreamingResponse=responses.StreamingResponse,
        uplot=Path(spec.submodule_search_locations[0]) / "static",
    )


def _missing() -> StrategyError:
    what = "top --web needs starlette, uvicorn and uplot-python"
    return StrategyError(what, hint="pip install 'jaxfleet[board]'")
