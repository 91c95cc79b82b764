"""Requests to a launch that runs, which its own thread carries out, one after the other."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from jaxfleet.errors import StrategyError
from jaxfleet.launch.starter import Asked, Events

_ANSWER_S = 30.0  # the launch answers within
_LOOK_S = 0.1

_Result = TypeVar("_Result")


class Requests:
    """Passes requests from the thread of the control socket to that of the launch.

    Attributes:
        is_open: the job runs, so that requests are answered.
    """

    def __init__(self, job: str, events: Events) -> None:
        self._job, self._events = job, events
        self.is_open = False

    def check(self) -> None:
        """Rejects a request while the job does not run.

        Raises:
            StrategyError: it is ending.
        """
        if not self.is_open:
            raise self._ending()

    def carry_out(self, act: Callable[[], _Result]) -> _Result:
        """Has the launch's thread call a function; returns what it returns.

        Raises:
            StrategyError: the job is ending; or what the function raises.
        """
        request = Asked(act, Future())
        self._events.put(request)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            try:
                result: _Result = request.answer.result(_LOOK_S)
            except TimeoutError:
                is_late = not self.is_open or time.monotonic() > deadline
                if is_late and request.answer.cancel():
                    raise self._ending() from None
            else:
                return result

    def answer(self, request: Asked) -> None:
        """Carries a request out, in the thread of the launch."""
        if not request.answer.set_running_or_notify_cancel():
            return
        try:
            request.answer.set_result(request.act())
        except (StrategyError, OSError) as error:  # OSError: a process could not be started
            request.answer.set_exception(error)

    def _ending(self) -> StrategyError:
        return StrategyError(f"job '{self._job}' is ending, or about to start again")
