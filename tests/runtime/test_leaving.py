"""SIGTERM lets a trainer leave where that is safe."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from jaxfleet.errors import StrategyError
from jaxfleet.runtime.leaving import LeaveRequest
from jaxfleet.strategy import DistributedStrategy


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Begins with the usual effect of SIGTERM, whatever runs the tests, and restores its own."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_sigterm_asks_once_and_the_next_ends_the_process() -> None:
    request = LeaveRequest(1000.0)
    assert request.listen()
    assert not request.is_made
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.is_made
    assert request.by_signal
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_process_whose_grace_is_over_is_ended() -> None:
    ended = threading.Event()
    request = LeaveRequest(0.01, ended.set)
    request.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.wait(60.0)


def test_the_grace_ends_when_no_step_is_left() -> None:
    ended = threading.Event()
    request = LeaveRequest(0.3, ended.set)
    request.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    request.stop()
    assert not ended.wait(0.6)


def test_a_handler_that_the_script_installs_later_counts() -> None:
    request = LeaveRequest(30.0)
    assert request.listen()
    signal.signal(signal.SIGTERM, lambda *_: None)
    assert not request.listen()


def test_a_request_of_the_script_is_no_signal() -> None:
    request = LeaveRequest(1000.0)
    request.make()
    assert request.is_made
    assert not request.by_signal


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_handler_of_the_script_stays(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, handler)
    request = LeaveRequest(30.0)
    assert not request.listen()
    request.stop()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_without_a_grace_the_signal_has_its_usual_effect() -> None:
    assert not LeaveRequest(0.0).listen()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_step_in_another_thread_installs_nothing() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(LeaveRequest(30.0).listen()))
    thread.start()
    thread.join()
    assert found == [False]


def test_a_trainer_that_has_ended_gives_the_signal_back() -> None:
    first, second = LeaveRequest(30.0), LeaveRequest(30.0)
    assert first.listen()
    assert not second.listen()  # of two steps, the first listens
    second.stop()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    first.stop()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


FORKS = """
import os, signal, time
from jaxfleet.runtime.leaving import LeaveRequest
request = LeaveRequest(1000.0)
assert request.listen()
begun, begins = os.pipe()
child = os.fork()
if not child:
    os.write(begins, b".")  # Python forgets a signal that comes while it forks
    for _ in range(6000):
        time.sleep(0.01)
    os._exit(3)
os.read(begun, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), request.is_made)
"""


@pytest.mark.grid
@pytest.mark.processes
def test_a_fork_ends_as_usual() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert done.stdout == f"{-signal.SIGTERM} False\n"


def test_a_grace_is_a_number_of_seconds() -> None:
    with pytest.raises(StrategyError, match="sigterm_grace_s is -1, but must be 0 or more"):
        DistributedStrategy(sigterm_grace_s=-1)
