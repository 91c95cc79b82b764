"""The worker of a server's long tasks: they take time, while the server answers messages."""

import random
from collections.abc import Callable

from jaxfleet.ps.server.event_loop import Done
from jaxfleet.ps.server.outbox import DeviceTask
from jaxfleet.testing.simulation.scheduler import Scheduler

_LONG = frozenset({"saving", "compiling", "loading"})
_LONG_S, _SHORT_S = 0.8, 0.05  # the longest that a task takes


class TaskQueue:
    """The worker of a server's long tasks, which take a drawn time of the simulation."""

    def __init__(
        self,
        scheduler: Scheduler,
        draw: random.Random,
        wake: Callable[[], None],
        attempt: Callable[[DeviceTask], Done],
    ) -> None:
        self._scheduler, self._draw = scheduler, draw
        self._wake, self._attempt = wake, attempt
        self._todo: list[tuple[float, DeviceTask]] = []
        self._free_s = 0.0

    def put(self, job: DeviceTask) -> None:
        now_s = self._scheduler.now_s
        longest_s = _LONG_S if job.what in _LONG else _SHORT_S
        self._free_s = max(self._free_s, now_s) + self._draw.uniform(0.0, longest_s)
        self._todo.append((self._free_s, job))
        self._scheduler.after(self._free_s - now_s, self._wake)

    @property
    def is_busy(self) -> bool:
        return bool(self._todo)

    def results(self) -> list[Done]:
        if not self._todo:
            return []
        now_s = self._scheduler.now_s
        due = [job for at_s, job in self._todo if at_s <= now_s]
        self._todo = [(at_s, job) for at_s, job in self._todo if at_s > now_s]
        return [self._attempt(job) for job in due]

    def close(self) -> None:
        self._todo.clear()
