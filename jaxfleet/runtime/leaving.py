"""How a trainer is asked to leave its job: by its script, or by SIGTERM, a notice of preemption."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def end_by_sigterm() -> None:
    """Ends this process as a SIGTERM without a handler does."""
    os.kill(os.getpid(), signal.SIGTERM)


class LeaveRequest:
    """Whether a trainer is to leave its job before its next step.

    Args:
        grace_s: how long the process may go on after a SIGTERM; 0 leaves the signal alone.
        end: ends the process after that, or if nothing can go on without it.

    Attributes:
        is_made: the trainer is to leave.
        by_signal: because of a SIGTERM.
    """

    def __init__(self, grace_s: float, end: Callable[[], None] = end_by_sigterm) -> None:
        self._grace_s, self.end = grace_s, end
        self._process: int | None = None  # in which the handler was installed
        self._timer: threading.Timer | None = None
        self.is_made = self.by_signal = False

    def make(self) -> None:
        self.is_made = True

    def listen(self) -> bool:
        """Lets a SIGTERM make the request, where that is safe; returns whether it does.

        Python runs handlers in the main thread, which alone may install one. A handler that the
        script has installed, or a signal that is ignored, stays.
        """
        if self._process == os.getpid():
            return signal.getsignal(signal.SIGTERM) == self._handle or self.by_signal
        is_main = threading.current_thread() is threading.main_thread()
        if not (self._grace_s and is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL):
            return False
        self._process = os.getpid()
        signal.signal(signal.SIGTERM, self._handle)
        return True

    def stop(self) -> None:
        """Gives SIGTERM its usual effect back: this process has no step left to leave before.

        Ends the grace, too: what the script does after its last step may take longer.
        """
        if self._timer is not None:
            self._timer.cancel()
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._process = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another one ends the process at once
        if os.getpid() != self._process:  # a fork, such as a worker that loads data
            self.end()
            return
        self.is_made = self.by_signal = True
        self._timer = threading.Timer(min(self._grace_s, threading.TIMEOUT_MAX), self.end)
        self._timer.daemon = True
        self._timer.start()
