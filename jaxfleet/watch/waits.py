"""The log of long waits: which peer waits for what, and for which peer, said once a wait."""

import time
from collections.abc import Callable

from jaxfleet.watch.notices import alert

LOGGED_AFTER_S = 15.0


class LongWait:
    """Logs a wait once, when it has taken 15 seconds.

    Args:
        clock: the time in seconds.
        say: takes the text; the logger `jaxfleet`, which prints to stderr unless it is set up
            otherwise.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        say: Callable[[str], None] = alert,
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
        """Logs the wait if it is time to.

        Args:
            describe: returns what it is: `trainer 0 waits for pull of w from server 1`.
        """
        if not self._is_logged and self.left_s <= 0:
            self._is_logged = True
            self._say(f"{describe()} (for {LOGGED_AFTER_S:.0f} s now)")
