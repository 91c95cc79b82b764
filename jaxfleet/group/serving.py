"""The thread of rank 0 in which a center hears all ranks."""

import threading
import time
from contextlib import suppress

from jaxfleet.errors import ClosedError
from jaxfleet.group.center import Answers, Center
from jaxfleet.ps.network import Listener

_LISTEN_S = 0.2  # the longest that silence goes uncounted
_CLOSING_S = 5.0


class Serving:
    """Lets a center hear, until it is closed.

    Args:
        center: knows of all ranks.
        listener: where they speak.
    """

    def __init__(self, center: Center, listener: Listener) -> None:
        self.center, self._listener = center, listener
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxfleet-center", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, when what is under way has been sent."""
        self._closing.set()
        self._listener.wake()
        self._thread.join(_CLOSING_S)
        self._listener.close()

    def _run(self) -> None:
        counted_s = time.monotonic()
        with suppress(ClosedError):
            while not self._closing.is_set():
                arrived = self._listener.receive(_LISTEN_S)
                now_s = time.monotonic()
                # If more has passed, this process stood still, and nobody could be heard.
                self._send(self.center.passed(min(now_s - counted_s, 2 * _LISTEN_S)))
                counted_s = now_s
                if arrived is not None:
                    self._send(self.center.take(*arrived))
                    if self.center.knows(arrived[1]):
                        self._listener.trust(arrived[0])

    def _send(self, answers: Answers) -> None:
        for line, message in answers:
            self._listener.send(line, message)
