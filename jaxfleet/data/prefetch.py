"""Reads batches ahead of their consumer, in background threads."""

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.errors import ClosedError, ProgramError
from jaxfleet.observability import LongWait

Read = Callable[[int], Any]  # returns the batch of a step


@dataclass
class _Shared:
    """What the consumer and its threads share; they do not refer to the consumer itself.

    So a consumer that is forgotten is collected, which ends its threads.
    """

    read: Read
    step: int  # the next one to hand out
    end: int | None
    ahead: int
    next_read: int = 0
    process: int = field(default_factory=os.getpid)
    is_closed: bool = False
    done: dict[int, tuple[Any, BaseException | None]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def claim(self) -> int | None:
        """Waits until a batch may be read; returns its step, or None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or self.next_read < self.step + self.ahead)
            if self.is_closed or self.next_read == self.end:
                return None
            self.next_read += 1
            return self.next_read - 1

    def deliver(self, step: int, batch: Any, error: BaseException | None) -> None:
        with self.changed:
            if not self.is_closed:
                self.done[step] = (batch, error)
                self.changed.notify_all()

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork, which has none of the threads.

        One of them may have held the lock of `changed` then, which stays locked in the fork.
        """
        return self.process != os.getpid()

    def close(self) -> None:
        if self.is_fork:
            return
        with self.changed:
            self.is_closed = True
            self.done.clear()
            self.changed.notify_all()


class Prefetcher:
    """Batches of successive steps, of which at most `ahead` are read and not yet taken.

    The threads end with the last step, when the prefetcher is closed or no longer referenced, and
    with the process: they are daemons, since a source may wait for a disk for ever.

    Args:
        read: returns the batch of a step; any thread calls it.
        step: the first step.
        end: the step after the last; None for no end.
        ahead: the most batches in memory.
        workers: the number of threads.
    """

    def __init__(self, read: Read, step: int, end: int | None, *, ahead: int, workers: int) -> None:
        self._shared = _Shared(read, step, end, ahead, next_read=step)
        self._close = weakref.finalize(self, self._shared.close)
        for number in range(min(workers, ahead)):
            name = f"jaxfleet-data-{number}"
            threading.Thread(target=_work, args=(self._shared,), name=name, daemon=True).start()

    def take(self) -> Any:
        """Returns the next batch; a wait for it of 15 seconds is logged.

        Raises:
            ClosedError: another thread has closed the prefetcher.
            ProgramError: this process is a fork of the one that made the prefetcher.
            BaseException: what reading it raised.
        """
        shared = self._shared
        if shared.is_fork:
            what = f"batch {shared.step} is read by threads of process {shared.process}"
            hint = "begin in the fork: loader.from_step(batches.step); or Loader(..., prefetch=0)"
            raise ProgramError(f"{what}, which its fork {os.getpid()} does not have", hint=hint)
        with shared.changed:
            wait = LongWait()
            while not (shared.is_closed or shared.step in shared.done):
                left_s = wait.left_s
                shared.changed.wait(left_s if left_s < float("inf") else None)
                if not (shared.is_closed or shared.step in shared.done):
                    wait.look(lambda: f"waiting for the source's batch of step {shared.step}")
            if shared.is_closed:
                raise ClosedError(f"the batches were closed at step {shared.step}")
            batch, error = shared.done.pop(shared.step)
            if error is None:
                shared.step += 1
                shared.changed.notify_all()
        if error is not None:
            self.close()
            raise error
        return batch

    def close(self) -> None:
        self._close()


def _work(shared: _Shared) -> None:
    while (step := shared.claim()) is not None:
        try:
            batch, error = shared.read(step), None
        except BaseException as found:  # noqa: BLE001  # raised again where the batch is taken
            batch, error = None, found
        shared.deliver(step, batch, error)
        if error is not None:
            return
