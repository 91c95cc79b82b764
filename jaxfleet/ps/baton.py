"""Runs threads one at a time, in an order that is the same every time, on a clock of their own.

A participant keeps the baton until it waits. The next one in order that has what it waits for
gets it; where nobody has, the clock jumps to the first deadline. So a deadline of ten seconds
costs nothing, and a program that passes once passes always.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.errors import ClosedError, ConnectError

_TICK_S = 1e-3  # what a wait that times out takes at least, so that polling ends too


@dataclass(eq=False)
class _Participant:
    name: str
    body: Callable[[], Any]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    deadline_s: float = 0.0
    done: bool = False
    result: Any = None


class Baton:
    """Passes control among participants.

    Outside of `run` there is one participant, whoever calls: a wait for what is not there ends at
    once, and the clock moves on.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._participants: list[_Participant] = []
        self._by_thread: dict[int, _Participant] = {}
        self._failure: BaseException | None = None
        self._stopped = False
        self._all_done = threading.Event()

    def clock(self) -> float:
        """Returns the seconds that have passed here."""
        return self._now_s

    def run(self, bodies: Mapping[str, Callable[[], Any]], *, longest_s: float) -> dict[str, Any]:
        """Runs all bodies to their ends and returns what they returned.

        The first exception in one ends the others by a ClosedError where they wait.

        Raises:
            ConnectError: they took more real seconds than `longest_s`.
        """
        if self._participants:
            raise ClosedError("participants are running already", hint="call run once at a time")
        self._participants = [_Participant(name, body) for name, body in bodies.items()]
        self._failure, self._stopped = None, False
        self._all_done.clear()
        everyone = self._participants
        try:
            for one in everyone:
                threading.Thread(target=self._live, args=(one,), name=one.name, daemon=True).start()
            self._pass_on(-1)
            if not self._all_done.wait(longest_s):
                running = ", ".join(one.name for one in everyone if not one.done)
                raise ConnectError(f"after {longest_s:g} s these still ran: {running}")
        finally:
            self._stopped = True
            self._participants = []
            for one in everyone:
                one.turn.release()  # where time ran out, some still wait, and now end
        if self._failure is not None:
            raise self._failure
        return {one.name: one.result for one in everyone}

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Lets others run until `ready`, or until the time is up.

        Raises:
            ClosedError: another participant failed.
        """
        deadline_s = self._now_s + max(timeout_s, _TICK_S)
        me = self._by_thread.get(threading.get_ident())
        if me is None:
            if not ready():
                self._now_s = deadline_s
            return
        self._check_running()
        me.ready, me.deadline_s = ready, deadline_s
        self._pass_on(self._participants.index(me))
        me.turn.acquire()
        self._check_running()

    def _check_running(self) -> None:
        if self._stopped:
            raise ClosedError("another participant of the network failed")

    def _live(self, me: _Participant) -> None:
        me.turn.acquire()
        self._by_thread[threading.get_ident()] = me
        everyone = self._participants
        try:
            if not self._stopped:
                me.result = me.body()
        except BaseException as failure:  # noqa: BLE001  `run` raises it in its caller's thread
            if not self._stopped:
                self._failure, self._stopped = failure, True
        finally:
            del self._by_thread[threading.get_ident()]
            me.done = True
            if self._participants is everyone:
                self._pass_on(everyone.index(me))

    def _pass_on(self, index: int) -> None:
        """Gives the baton to the next participant after `index`, which may be that one itself."""
        order = self._participants[index + 1 :] + self._participants[: index + 1]
        waiting = [one for one in order if not one.done]
        if not waiting:
            self._all_done.set()
            return
        following = next((one for one in waiting if self._stopped or one.ready()), None)
        if following is None:
            following = min(waiting, key=lambda one: one.deadline_s)  # the first of equals
            self._now_s = max(self._now_s, following.deadline_s)
        following.turn.release()
