"""Notices a line that ZeroMQ gave up without a word.

Where what answers at an address does not speak as it should (a stranger on the port, another
secret), libzmq 4.3.5 may end its tries to connect and go on to take messages, which nobody will
read: about one time in 500, and nothing but the events of the socket shows it. While it tries,
there is an event for each try.
"""

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from jaxfleet.ps.zmq_ends import End, Timing

_PATIENCE = 1.5  # times what a try may take
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REFUSALS, _REFUSED_S = 2, 3.0  # a server that starts or ends may refuse one
_SOON_S = 2.0  # until the first try after a line broke


class Watch:
    """Watches one line; whoever uses the line asks it now and then.

    Args:
        line: not yet connected.
        end: what the line belongs to.
        timing: says how long a try to connect may take.
        clock: the time in seconds.
    """

    def __init__(
        self,
        line: "zmq.Socket[bytes]",
        end: End,
        timing: Timing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events = line.get_monitor_socket()
        end.keep(self._events)
        self._clock = clock
        self._limit_s = _PATIENCE * timing.handshake_s + timing.reconnect_s
        self._soon_s = _SOON_S + timing.reconnect_s
        self._is_open = self._broke = self._is_renewed = False
        self._was_open = False
        self._refusals, self._refused_at = 0, 0.0
        self._since = clock()

    @property
    def is_given_up(self) -> bool:
        """Whether the line is not open, and nothing was tried for longer than a try may take."""
        self._read_events()
        limit_s = self._soon_s if self._broke else self._limit_s
        return not self._is_open and self._clock() - self._since > limit_s

    @property
    def is_refused(self) -> bool:
        """Whether what answers has ended every handshake for some time, as without the secret."""
        self._read_events()
        refused_s = self._clock() - self._refused_at
        return self._refusals >= _REFUSALS and refused_s >= _REFUSED_S

    def take_renewed(self) -> bool:
        """Returns whether the line was opened anew, after it had been open, since the last call."""
        self._read_events()
        renewed, self._is_renewed = self._is_renewed, False
        return renewed

    def _read_events(self) -> None:
        while self._events.poll(0):
            event = recv_monitor_message(self._events, zmq.NOBLOCK)["event"]
            # A line that breaks is tried again at once, unless ZeroMQ gives it up there.
            self._broke = event == zmq.EVENT_DISCONNECTED and self._is_open
            self._is_open = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_open:
                self._refusals = 0
            elif event & _FAILED:
                self._refusals += 1
                self._refused_at = self._refused_at if self._refusals > 1 else self._clock()
            self._is_renewed = self._is_renewed or (self._is_open and self._was_open)
            self._was_open = self._was_open or self._is_open
            self._since = self._clock()

    def start_again(self) -> None:
        """Counts from now: the line was connected anew."""
        self._is_open, self._broke, self._since = False, False, self._clock()
