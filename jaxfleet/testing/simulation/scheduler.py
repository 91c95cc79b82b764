"""A cooperative scheduler with a virtual clock: one task runs at a time, until it waits.

Tasks are greenlets of one thread, since the code under test blocks where it waits. The clock
advances from event to event while all tasks wait, so an hour of waiting takes no time, and nothing
depends on the machine: the same events give the same run. (With threads that take turns, the
switches took most of the time on a busy machine: 0.7 ms each, 200 a schedule.)
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from greenlet import getcurrent, greenlet

_LEAST_S = 1e-4  # of a wait, so that polling advances the clock


class KilledError(BaseException):
    """Ends a task of a killed process; no `except Exception` of the process may catch it."""


class StuckError(Exception):
    """The simulation did not end: a wait has no end, or the limit of CPU time was exceeded."""


_spent_s = time.process_time  # which the simulation does not replace


@dataclass(eq=False)
class Process:
    """A process of the simulated job, whose tasks are killed and suspended together.

    Attributes:
        stopped_until: it is suspended before this time.
        ahead_s: how far its clock is ahead of the simulation's.
    """

    name: str
    is_alive: bool = True
    stopped_until: float = 0.0
    ahead_s: float = 0.0


@dataclass(eq=False)
class Task:
    """A thread of a process."""

    name: str
    process: Process
    thread: greenlet = field(default_factory=greenlet)
    ticket: int = 0  # of the current wait
    is_waiting: bool = False


@dataclass
class Scheduler:
    """Runs tasks and events.

    Attributes:
        crashes: errors that tasks of living processes did not catch, by the name of the task.
    """

    now_s: float = 0.0
    crashes: list[tuple[str, BaseException]] = field(default_factory=list)
    _heap: list[tuple[float, int, Callable[[], None], bool]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _ready: deque[Task] = field(default_factory=deque)
    _live: dict[Task, None] = field(default_factory=dict)
    _current: Task | None = None
    _pending: int = 0  # events that keep the simulation running without tasks
    _hub: greenlet = field(default_factory=getcurrent)

    @property
    def process(self) -> Process | None:
        """The process of the running task."""
        return self._current.process if self._current is not None else None

    def clock(self) -> float:
        """Returns the time in seconds by the clock of the running process."""
        process = self.process
        return self.now_s + (process.ahead_s if process is not None else 0.0)

    def after(self, seconds: float, action: Callable[[], None], *, keeps: bool = False) -> None:
        """Schedules an action; one that `keeps` the simulation running is awaited at its end."""
        self._pending += keeps
        heapq.heappush(self._heap, (self.now_s + seconds, next(self._order), action, keeps))

    def start(self, process: Process, name: str, body: Callable[[], object]) -> Task:
        """Starts a task."""
        task = Task(name, process)
        # Its end returns to the scheduler, whichever task has started it.
        task.thread = greenlet(lambda: self._run_task(task, body), self._hub)
        self._live[task] = None
        self._ready.append(task)
        return task

    def run(self, *, limit_s: float, cpu_s: float) -> None:
        """Runs until all tasks have ended.

        Raises:
            StuckError: tasks still run after `limit_s` seconds of the simulation, or `cpu_s`
                of the processor.
        """
        self._hub, until = getcurrent(), _spent_s() + cpu_s
        while self._live or self._pending:
            if self._ready:
                self._resume(self._ready.popleft())
                continue
            when, _, action, keeps = heapq.heappop(self._heap)
            self.now_s = max(self.now_s, when)
            if self.now_s > limit_s or _spent_s() > until:
                raise self._stuck(limit_s, cpu_s)
            self._pending -= keeps
            action()

    def _stuck(self, limit_s: float, cpu_s: float) -> StuckError:
        """Ends all tasks, and returns the error that names them."""
        running = ", ".join(task.name for task in self._live)
        for task in list(self._live):
            task.process.is_alive = False
            self._resume(task)
        limit = f"{limit_s:g} s" if self.now_s > limit_s else f"{cpu_s:g} s of CPU time"
        return StuckError(f"after {limit} these still run: {running}")

    def _resume(self, task: Task) -> None:
        """Lets a task run until it waits, unless its process is suspended."""
        stopped_s = task.process.stopped_until - self.now_s
        if stopped_s > 0 and task.process.is_alive:
            self.after(stopped_s, lambda: self._ready.append(task))
            return
        self._current = task
        task.thread.switch()
        self._current = None

    def current(self) -> Task:
        """Returns the running task."""
        assert self._current is not None, "only a task waits"
        return self._current

    def wait(self, timeout_s: float) -> None:
        """Lets others run until the running task is woken, or the timeout has passed."""
        me = self.current()
        if not me.process.is_alive:
            raise KilledError
        me.ticket, me.is_waiting = me.ticket + 1, True
        ticket = me.ticket
        self.after(max(timeout_s, _LEAST_S), lambda: self._expire(me, ticket))
        self._hub.switch()
        if not me.process.is_alive:
            raise KilledError

    def sleep(self, seconds: float) -> None:
        """Lets others run for a time, and longer while the process is suspended."""
        until = self.now_s + seconds
        while (left_s := until - self.now_s) > 0:
            self.wait(left_s)

    def wake(self, task: Task) -> None:
        """Ends a task's wait."""
        if task.is_waiting:
            task.is_waiting = False
            self._ready.append(task)

    def kill(self, process: Process) -> None:
        """Ends a process's tasks where they wait; the running one ends at its next wait."""
        process.is_alive = False
        for task in list(self._live):
            if task.process is process:
                self.wake(task)

    def _expire(self, task: Task, ticket: int) -> None:
        if task.ticket == ticket:
            self.wake(task)

    def _run_task(self, task: Task, body: Callable[[], object]) -> None:
        try:
            if task.process.is_alive:
                body()
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001  # the caller looks at it
            if task.process.is_alive:
                self.crashes.append((task.name, error))
        del self._live[task]
