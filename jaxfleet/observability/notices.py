"""Notices for the user through `logging`: one-time lines, progress, and long waits.

The logger is `jaxfleet`. A program that configures logging controls it; otherwise notices go to
stderr, one line each, since a step without output for minutes looks hung.
"""

import logging
import time
from collections.abc import Callable

_LOGGER = logging.getLogger("jaxfleet")


def notify(text: str) -> None:
    """Logs a line at level INFO."""
    if not _LOGGER.hasHandlers():
        _LOGGER.addHandler(logging.StreamHandler())
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.info("jaxfleet: %s", text)


def alert(text: str) -> None:
    """Logs a line at level WARNING, which Python shows on stderr by default."""
    _LOGGER.warning("jaxfleet: %s", text)


class Progress:
    """Progress notices about work of several parts, once it has taken a while.

    Args:
        what: names the work: `memory_budget of 'train_step'`.
        quiet_s: seconds without notices; work that ends by then is not worth a line.
        clock: seconds, as `time.monotonic` counts them.
    """

    def __init__(
        self, what: str, *, quiet_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._quiet_s, self._clock = what, quiet_s, clock
        self._began = clock()

    def report(self, text: str) -> None:
        seconds = self._clock() - self._began
        if seconds >= self._quiet_s:
            notify(f"{self._what}: {text} ({seconds:.0f} s so far)")


LOGGED_AFTER_S = 15.0


class LongWait:
    """Logs a wait once, when it has taken 15 seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, say: Callable[[str], None] = alert
    ) -> None:
        self._clock, self._say = clock, say
        self._since = clock()
        self._is_logged = False

    @property
    def left_s(self) -> float:
        """Seconds until it is logged; infinite once it is."""
        if self._is_logged:
            return float("inf")
        return max(0.0, self._since + LOGGED_AFTER_S - self._clock())

    def look(self, describe: Callable[[], str]) -> None:
        if not self._is_logged and self.left_s <= 0:
            self._is_logged = True
            self._say(f"{describe()} (for {LOGGED_AFTER_S:.0f} s now)")
