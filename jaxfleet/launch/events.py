"""Events of a launch in one queue: process exits, signals and timers."""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

from jaxfleet.launch.process import Process
from jaxfleet.observability import LongWait

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """A process has ended; its descendants may still run."""

    process: Process


@dataclass(frozen=True)
class Gone:
    """A process and its descendants have ended, and all their output was shown."""

    process: Process


@dataclass(frozen=True)
class Told:
    """This process received a signal or an equivalent request."""

    number: signal.Signals


@dataclass(frozen=True)
class Due:
    """It is time to start a server again."""

    index: int


Event: TypeAlias = Ended | Gone | Told | Due


class Events:
    """Queue of events. Any thread or signal handler may put one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def put_later(self, event: Event, seconds: float) -> None:
        timer = threading.Timer(seconds, self._queue.put, [event])
        timer.daemon = True
        timer.start()

    def next(self, deadline: float) -> Event | None:
        """Returns the next event, or None at the deadline."""
        left = deadline - time.monotonic()
        try:
            return self._queue.get(timeout=min(max(left, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            return None

    def awaited(self, deadline: float, wait: LongWait, describe: Callable[[], str]) -> Event | None:
        """Returns the next event, as `next`, and logs the wait for it once it is long."""
        event = self.next(min(deadline, time.monotonic() + wait.left_s))
        if event is None and time.monotonic() < deadline:
            wait.look(describe)
            event = self.next(deadline)
        return event

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Context in which termination signals become events.

        Signals reach only the main thread; in another one this does nothing. Signals that are
        ignored, as under `nohup` and in a shell's background jobs, stay ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [each for each in _STOPPING if signal.getsignal(each) != signal.SIG_IGN]
        before = [(each, signal.signal(each, self._tell)) for each in heard]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.put(Told(signal.Signals(number)))
