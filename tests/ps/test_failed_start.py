"""A server process that fails to start leaves no descriptor open, and no thread running."""

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxfleet.errors import ConnectError, ProgramError
from jaxfleet.ps.server import ServerCore, ServerOptions
from jaxfleet.ps.server import process as serving


@pytest.fixture(autouse=True)
def process_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the settings of this process, which a server's own process changes."""
    for name in ("keep_freed_memory", "compute_in_place", "raise_descriptor_limit"):
        monkeypatch.setattr(serving, name, lambda: None)
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def opened() -> tuple[int, list[str]]:
    """Returns the number of open descriptors, and the names of the threads."""
    return len(list(Path("/dev/fd").iterdir())), sorted(one.name for one in threading.enumerate())


def check_nothing_is_left(start: Callable[[], None]) -> None:
    start()  # first creates everything that lives as long as the process
    before = opened()
    start()
    assert opened() == before


def test_a_port_that_is_taken_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"

        def start() -> None:
            with pytest.raises(ConnectError):
                serving.serve(endpoint, ServerOptions(), insecure=True)

        check_nothing_is_left(start)


def test_a_program_that_fails_leaves_nothing_open() -> None:
    def fail(_: ServerCore) -> None:
        raise ProgramError("an operator fails")

    def start() -> None:
        with pytest.raises(ProgramError, match="an operator fails"):
            serving.serve("127.0.0.1:0", ServerOptions(), insecure=True, begin=fail)

    check_nothing_is_left(start)


def test_metrics_that_cannot_be_served_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("JAXFLEET_METRICS_PORT", str(taken.getsockname()[1]))

        def start() -> None:
            with pytest.raises(ConnectError, match="metrics cannot be served"):
                serving.serve("127.0.0.1:0", ServerOptions(), insecure=True)

        check_nothing_is_left(start)
