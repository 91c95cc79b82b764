"""Notices for the user through `logging`: one-time lines, and long waits.

The logger is `jaxfleet`. A program that configures logging controls it; otherwise notices go to
stderr, one line each, since a step without output for minutes looks hung.
"""

import logging
import time
from collections.abc import Callable

_LOGGER = logging.getLogger("jaxfleet")
_own: list[logging.Handler] = []  # the handler of a program that configures no logging


def is_configured() -> bool:
    """Whether the program configures logging, so that notices go where it wants them."""
    handlers = [*_LOGGER.handlers, *logging.getLogger().handlers]
    return any(handler not in _own for handler in handlers)


def notify(text: str) -> None:
    """Logs a line at level INFO."""
    if not _LOGGER.hasHandlers():
        _own[:] = [logging.StreamHandler()]
        _LOGGER.addHandler(_own[0])
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.info("jaxfleet: %s", text)


def alert(text: str) -> None:
    """Logs a line at level WARNING, which Python shows on stderr by default."""
    _LOGGER.warning("jaxfleet: %s", text)


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
