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
        self._is_open = False
        self._since = clock()

    @property
    def is_given_up(self) -> bool:
        """Whether the line is not open, and nothing was tried for longer than a try may take."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events, zmq.NOBLOCK)["event"]
            self._is_open = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._since = self._clock()
        return not self._is_open and self._clock() - self._since > self._limit_s

    def start_again(self) -> None:
        """Counts from now: the line was connected anew."""
        self._is_open, self._since = False, self._clock()
