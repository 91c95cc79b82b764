"""Reads ahead: a thread makes what is wanted next, and waits where enough lies ready."""

import queue
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LOOK_S = 0.1  # between two looks whether the reading stopped
_LEAVE_S = 5.0  # for a generator to come to its next sample, where it is told to stop


class Ahead(Generic[T]):
    """Items of an iterator that a thread of its own makes.

    Args:
        make: returns the iterator; called on that thread, as its steps are.
        capacity: how many items may lie ready.
    """

    def __init__(self, make: Callable[[], Iterable[T]], capacity: int) -> None:
        self._make = make
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(max(capacity, 1))
        self._stopped = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._fill, name="read ahead", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Returns the next item, as soon as there is one.

        Raises:
            StopIteration: there is none, now or ever again.
            Exception: what the iterator raised, with its traceback.
        """
        if self._ended:
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "item":
            item: T = value
            return item
        self.stop()
        if kind == "error":
            raise value
        raise StopIteration

    def stop(self) -> None:
        """Ends the thread; what lies ready is let go."""
        self._ended = True
        self._stopped.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            what = f"a generator of data did not come to its next sample within {_LEAVE_S:.0f} s"
            warnings.warn(f"{what} of being told to stop: its thread is left behind", stacklevel=3)

    def _fill(self) -> None:
        last: tuple[str, Any] = ("end", None)
        try:
            for item in self._make():
                if not self._put(("item", item)):
                    return
        except BaseException as error:  # noqa: BLE001  # whoever takes gets it
            last = ("error", error)
        self._put(last)

    def _put(self, item: tuple[str, Any]) -> bool:
        """Waits for room; returns whether there was some before the reading stopped."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False
