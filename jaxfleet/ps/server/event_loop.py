"""The event loop of a server, its worker thread, and its file descriptors."""

import contextlib
import os
import queue
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from jaxfleet.observability import NO_SPANS, Spans
from jaxfleet.ps.server.metrics import ServerMetrics
from jaxfleet.ps.server.outbox import DeviceTask
from jaxfleet.ps.server.state_machine import ServerCore
from jaxfleet.transport.messages import Connections, Listener, Message, Peer

_MAX_DESCRIPTORS = 1 << 16
_RESERVED_DESCRIPTORS = 64  # a checkpoint writes several files at once, each through a folder


def raise_descriptor_limit() -> None:
    """Raises the soft limit of file descriptors to the hard limit, at most to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the system has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DescriptorReserve:
    """File descriptors reserved for writing and reading checkpoints.

    Connections could otherwise take all of them between two checkpoints. Thread-safe.
    """

    def __init__(self, count: int = _RESERVED_DESCRIPTORS) -> None:
        self._count = count
        self._users = 0
        self._lock = threading.Lock()
        self._kept: list[int] = []
        self._take()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Frees the descriptors while the block runs."""
        with self._lock:
            self._users += 1
            self._give()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._take()

    def close(self) -> None:
        """Frees the descriptors permanently."""
        with self._lock:
            self._count = 0
            self._give()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # fewer are left; retried next time
            while len(self._kept) < self._count:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _give(self) -> None:
        while self._kept:
            os.close(self._kept.pop())


_TICK_S = 0.2
_PUBLISH_S = 0.25  # interval between published metrics
_STILL_S = 1.0  # a longer gap between ticks means the process was suspended
_SHORT_S = 0.01  # shorter tasks run between messages: a second thread would cost more
_AT_A_TIME_S = 0.05  # of short tasks before messages are handled

_OF_FILES = frozenset({"saving", "loading"})  # tasks that use reserved descriptors

Done: TypeAlias = tuple[DeviceTask, Any, Exception | None]


class TaskWorker(Protocol):
    """Runs the long tasks of a server, in order, while it answers messages."""

    def put(self, job: DeviceTask) -> None: ...

    @property
    def is_busy(self) -> bool:
        """Whether there are tasks whose results were not taken."""
        ...

    def results(self) -> list[Done]:
        """Takes the results of completed tasks."""
        ...

    def close(self) -> None: ...


MakeWorker: TypeAlias = Callable[[Callable[[], None], Callable[[DeviceTask], Done]], TaskWorker]
"""Given what wakes the server, and what runs a task."""


class Server:
    """The event loop of one server.

    Args:
        core: the state machine.
        listener: receives messages.
        connect: connects to the other servers, for partial sums.
        clock: the core's clock.
        threaded: run long tasks in a worker, so that messages are answered meanwhile.
        make_worker: the worker of long tasks, a thread by default.
        publish: receives metrics four times a second.
        spans: records activities.
        reserve: descriptors for checkpoints.
        stopping: set once `serve` is to return; its own event by default.
    """

    def __init__(
        self,
        core: ServerCore,
        listener: Listener,
        *,
        connect: Callable[[Sequence[str]], Connections],
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
        make_worker: MakeWorker | None = None,
        publish: Callable[[ServerMetrics], None] | None = None,
        spans: Spans = NO_SPANS,
        reserve: DescriptorReserve | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._attempt = _Attempt(spans, reserve or DescriptorReserve(0))
        self._core = core
        self._listener = listener
        self._connect = connect
        self._clock = clock
        self._connections: Connections | None = None
        self._ticked = self._published = clock()
        self._publish = publish
        make = make_worker or _Worker
        self._worker = make(listener.wake, self._attempt) if threaded else None
        self._beside = make(listener.wake, self._attempt) if threaded else None
        self._todo: deque[DeviceTask] = deque()
        self._stop = stopping or threading.Event()

    def stop(self) -> None:
        """Makes `serve` return soon; safe from any thread."""
        self._stop.set()
        self._listener.wake()

    def serve(self) -> int:
        """Serves until all trainers have left, and returns the process's exit code.

        The code is 1 if a block failed or no trainer is alive. The listener stays open if this
        process is to serve anew (`ServerCore.next_members`).
        """
        try:
            while not self._core.finished and not self._stop.is_set():
                self._turn()
            self._core.end()
        finally:
            for worker in (self._worker, self._beside):
                if worker is not None:
                    worker.close()
            if self._connections is not None:
                self._connections.close()
            if self._core.next_members is None:
                self._listener.close()
        return 0 if self._core.failure is None else 1

    def _turn(self) -> None:
        found = self._listener.receive(0.0 if self._todo else _TICK_S)
        if found is not None:
            self._send(self._core.handle(*found))
            if self._core.knows(*found):
                self._listener.trust(found[0])
        self._compute()
        now = self._clock()
        if now - self._ticked >= _TICK_S:
            if now - self._ticked > _STILL_S:
                self._core.forgive(now - self._ticked)
            self._ticked = now
            self._core.counters.rejected = self._listener.rejected
            self._core.disconnected(self._listener.ended())
            self._send(self._core.tick(now))
            self._drain()
            self._tell(now)
        self._send_parts()

    def _tell(self, now: float) -> None:
        if self._publish is not None and now - self._published >= _PUBLISH_S:
            self._published = now
            self._publish(self._core.metrics(now))

    def _compute(self) -> None:
        if self._worker is None or self._beside is None:
            self._send(self._core.run_tasks())
            return
        for done in (*self._worker.results(), *self._beside.results()):
            self._end(done)
        until = self._clock() + _AT_A_TIME_S
        while self._has_work() and self._clock() < until:
            job = self._todo.popleft()
            if job.is_beside:
                self._beside.put(job)
            elif self._worker.is_busy or job.expected_s > _SHORT_S:
                self._worker.put(job)
            else:
                self._end(self._attempt(job))

    def _has_work(self) -> bool:
        self._todo += self._core.take_tasks()  # completed tasks may enable others
        return bool(self._todo)

    def _end(self, done: Done) -> None:
        job, result, error = done
        self._send(self._core.fail(job, error) if error else self._core.finish(job, result))

    def _send(self, replies: Sequence[tuple[Peer, Message]]) -> None:
        for peer, message in replies:
            self._listener.send(peer, message)

    def _send_parts(self) -> None:
        for server, message in self._core.take_links():
            if self._connections is None:
                self._connections = self._connect(self._core.servers)
            self._connections.send(server, message)

    def _drain(self) -> None:
        """Discards replies of other servers, which can only be errors."""
        while self._connections is not None and self._connections.receive(0.0) is not None:
            pass


@dataclass(frozen=True)
class _Attempt:
    """Runs a task and records its span."""

    spans: Spans
    reserve: DescriptorReserve

    def __call__(self, job: DeviceTask) -> Done:
        files = self.reserve.lent() if job.what in _OF_FILES else nullcontext()
        with self.spans.span(job.what), files:
            return (job, *job.attempt())


class _Worker:
    """A thread that runs tasks in order."""

    def __init__(self, wake: Callable[[], None], attempt: _Attempt) -> None:
        self._wake, self._attempt = wake, attempt
        self._todo: queue.SimpleQueue[DeviceTask | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name="jaxfleet server", daemon=True)
        self._thread.start()

    def put(self, job: DeviceTask) -> None:
        self._waiting += 1
        self._todo.put(job)

    @property
    def is_busy(self) -> bool:
        """Whether there are tasks whose results were not taken."""
        return self._waiting > 0

    def results(self) -> list[Done]:
        found = []
        while True:
            try:
                found.append(self._done.get_nowait())
            except queue.Empty:
                self._waiting -= len(found)
                return found

    def close(self) -> None:
        """Ends the thread; a hanging task does not block the process."""
        self._todo.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (job := self._todo.get()) is not None:
            self._done.put(self._attempt(job))
            self._wake()
