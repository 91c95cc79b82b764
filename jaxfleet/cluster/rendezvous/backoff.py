"""Polling with backoff and a deadline."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxfleet.observability import LongWait

_FIRST_S, _LONGEST_S = 0.001, 0.1


@dataclass
class Poll:
    """Polls with growing intervals until a deadline."""

    seconds: float

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._pause_s = _FIRST_S
        self._wait = LongWait()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def pause(self, describe: Callable[[], str]) -> None:
        self._wait.look(describe)
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_S)
