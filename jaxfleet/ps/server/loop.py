"""Runs a server: takes messages from the network, computes, and carries the answers back."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxfleet.ps.descriptors import Reserve
from jaxfleet.ps.messages import Message
from jaxfleet.ps.network import Lines, Listener, Peer
from jaxfleet.ps.server.core import ServerCore
from jaxfleet.ps.server.desk import Job
from jaxfleet.ps.server.figures import Figures
from jaxfleet.watch import NO_SPANS, Spans

_TICK_S = 0.2
_PUBLISH_S = 0.5  # how old figures may be that watchers see
_STILL_S = 1.0  # longer than this between two ticks, the process stood still
_SHORT_S = 0.01  # what takes no longer is done between two messages: two threads would cost more
_AT_A_TIME_S = 0.05  # of short work, before messages are looked at

_OF_FILES = frozenset({"saving", "loading"})  # what is done with descriptors of the reserve

Done: TypeAlias = tuple[Job, Any, Exception | None]


class Server:
    """One server.

    Args:
        core: what it does with messages.
        listener: where they come from.
        connect: makes lines to servers, to send parts of a step to the others; `Network.connect`.
        clock: the core's.
        threaded: do work that takes long on a thread of its own, so that messages are answered
            meanwhile.
        publish: is given figures twice a second.
        spans: notes what is done when.
        reserve: descriptors for checkpoints.
    """

    def __init__(
        self,
        core: ServerCore,
        listener: Listener,
        *,
        connect: Callable[[Sequence[str]], Lines],
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
        publish: Callable[[Figures], None] | None = None,
        spans: Spans = NO_SPANS,
        reserve: Reserve | None = None,
    ) -> None:
        self._attempt = _Attempt(spans, reserve or Reserve(0))
        self._core = core
        self._listener = listener
        self._connect = connect
        self._clock = clock
        self._lines: Lines | None = None
        self._ticked = self._published = clock()
        self._publish = publish
        self._worker = _Worker(listener.wake, self._attempt) if threaded else None
        self._todo: deque[Job] = deque()
        self._stop = threading.Event()

    def stop(self) -> None:
        """Makes `serve` return soon; any thread may call it."""
        self._stop.set()
        self._listener.wake()

    def serve(self) -> int:
        """Serves until all trainers said bye, and returns the process's exit code.

        The code is 1 where a block failed, or no trainer lives any more.
        """
        try:
            while not self._core.finished and not self._stop.is_set():
                self._turn()
            self._core.end()
        finally:
            if self._worker is not None:
                self._worker.close()
            if self._lines is not None:
                self._lines.close()
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
            self._core.rejected = self._listener.rejected
            self._send(self._core.tick(now))
            self._drain()
            self._tell(now)
        self._send_parts()

    def _tell(self, now: float) -> None:
        """Gives figures to who watches, where they are old."""
        if self._publish is not None and now - self._published >= _PUBLISH_S:
            self._published = now
            self._publish(self._core.figures(now))

    def _compute(self) -> None:
        if self._worker is None:
            self._send(self._core.run_jobs())
            return
        for done in self._worker.results():
            self._end(done)
        until = self._clock() + _AT_A_TIME_S
        while self._has_work() and self._clock() < until:
            job = self._todo.popleft()
            if self._worker.is_busy or job.expected_s > _SHORT_S:
                self._worker.put(job)
            else:
                self._end(self._attempt(job))

    def _has_work(self) -> bool:
        self._todo += self._core.take_jobs()  # what was done may have made more possible
        return bool(self._todo)

    def _end(self, done: Done) -> None:
        job, result, error = done
        self._send(self._core.fail(job, error) if error else self._core.finish(job, result))

    def _send(self, replies: Sequence[tuple[Peer, Message]]) -> None:
        for peer, message in replies:
            self._listener.send(peer, message)

    def _send_parts(self) -> None:
        """Sends what is for other servers."""
        for server, message in self._core.take_links():
            if self._lines is None:
                self._lines = self._connect(self._core.servers)
            self._lines.send(server, message)

    def _drain(self) -> None:
        """Takes what other servers answered, which can only be that a message was refused."""
        while self._lines is not None and self._lines.receive(0.0) is not None:
            pass


@dataclass(frozen=True)
class _Attempt:
    """Does a job, and notes when."""

    spans: Spans
    reserve: Reserve

    def __call__(self, job: Job) -> Done:
        files = self.reserve.lent() if job.what in _OF_FILES else nullcontext()
        with self.spans.span(job.what), files:
            return (job, *job.attempt())


class _Worker:
    """A thread that does one job after another."""

    def __init__(self, wake: Callable[[], None], attempt: _Attempt) -> None:
        self._wake, self._attempt = wake, attempt
        self._todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name="jaxfleet server", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Hands a job in."""
        self._waiting += 1
        self._todo.put(job)

    @property
    def is_busy(self) -> bool:
        """Whether there are jobs whose results were not taken yet."""
        return self._waiting > 0

    def results(self) -> list[Done]:
        """Returns what is done."""
        found = []
        while True:
            try:
                found.append(self._done.get_nowait())
            except queue.Empty:
                self._waiting -= len(found)
                return found

    def close(self) -> None:
        """Lets the thread end; a job that hangs does not keep the process."""
        self._todo.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (job := self._todo.get()) is not None:
            self._done.put(self._attempt(job))
            self._wake()
