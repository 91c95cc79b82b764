"""Looks again and again for what other processes do, and no longer than agreed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxfleet.watch import LongWait

_FIRST_S, _LONGEST_S = 0.001, 0.1


@dataclass
class Poll:
    """Waits a little longer between one look and the next.

    Attributes:
        seconds: how long it may take in all.
    """

    seconds: float

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._pause_s = _FIRST_S
        self._wait = LongWait()

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._deadline

    def pause(self, describe: Callable[[], str]) -> None:
        """Waits until it is worth looking again.

        Args:
            describe: returns what is waited for, for the log.
        """
        self._wait.look(describe)
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_S)
