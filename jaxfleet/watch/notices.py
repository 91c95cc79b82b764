"""Notices: lines for the person who watches a job, through Python's `logging`.

The logger is `jaxfleet`. A program that configured logging gets the notices as it configured them;
for any other they go to stderr, a line each, since a step that says nothing for minutes looks hung.
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
    """Notices about work of several parts, once it has taken long enough to be missed.

    Args:
        what: names the work: `memory_budget of 'train_step'`.
        quiet_s: seconds for which nothing is said; what is done by then is not worth a line.
        clock: seconds, as `time.monotonic` counts them.
    """

    def __init__(
        self, what: str, *, quiet_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._quiet_s, self._clock = what, quiet_s, clock
        self._began = clock()

    def report(self, text: str) -> None:
        """Says what has been done, or is done now."""
        seconds = self._clock() - self._began
        if seconds >= self._quiet_s:
            notify(f"{self._what}: {text} ({seconds:.0f} s so far)")
