"""Readers: functions that return an iterator over samples, their combinators, and prefetching.

A reader is called once per pass over the data, so each pass starts from the beginning.
"""

import itertools
import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from jaxfleet.errors import ProgramError

T = TypeVar("T")

_LOOK_S = 0.1  # between two checks whether the reading stopped
_LEAVE_S = 5.0  # for a generator to reach its next sample after a stop


class Prefetcher(Generic[T]):
    """Reads up to `capacity` items ahead from an iterator in a thread, which also calls `make`."""

    def __init__(self, make: Callable[[], Iterable[T]], capacity: int) -> None:
        self._make = make
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(max(capacity, 1))
        self._stopped = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._fill, name="read ahead", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Waits for the next item.

        Raises:
            StopIteration: there are no more items.
            Exception: any exception of the iterator, with its traceback.
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
        """Stops the thread and discards the remaining items."""
        self._ended = True
        self._stopped.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            what = f"a generator of data did not come to its next sample within {_LEAVE_S:.0f} s"
            warnings.warn(f"{what} after it was stopped: its thread is left behind", stacklevel=3)

    def _fill(self) -> None:
        last: tuple[str, Any] = ("end", None)
        try:
            for item in self._make():
                if not self._put(("item", item)):
                    return
        except BaseException as error:  # noqa: BLE001  # raised again in the consumer
            last = ("error", error)
        self._put(last)

    def _put(self, item: tuple[str, Any]) -> bool:
        """Waits for room in the queue; False if the reading stopped first."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False


Reader: TypeAlias = Callable[[], Iterable[Any]]

_SHORT = object()  # the missing sample of a reader that ended before the others


class ComposeNotAligned(ProgramError):  # noqa: N818  # fluid's name
    """A reader ended before the others."""


def batch(reader: Reader, batch_size: int, drop_last: bool = False) -> Reader:
    """Yields lists of `batch_size` samples; an incomplete one at the end is kept or dropped.

    Raises:
        ProgramError: the size is not positive.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ProgramError(f"batch_size is {batch_size!r}", hint="it is 1 or more")

    def batches() -> Iterator[list[Any]]:
        samples = iter(reader())
        while rows := list(itertools.islice(samples, batch_size)):
            if len(rows) == batch_size or not drop_last:
                yield rows

    return batches


def shuffle(reader: Reader, buf_size: int) -> Reader:
    """Shuffles blocks of `buf_size` samples with Python's own random numbers."""

    def shuffled() -> Iterator[Any]:
        samples = iter(reader())
        while rows := list(itertools.islice(samples, buf_size)):
            random.shuffle(rows)
            yield from rows

    return shuffled


def map_readers(func: Callable[..., Any], *readers: Reader) -> Reader:
    """Yields the results of a function of one sample of each reader."""
    return lambda: map(func, *(reader() for reader in readers))


def chain(*readers: Reader) -> Reader:
    """Yields the samples of one reader after another."""
    return lambda: itertools.chain.from_iterable(reader() for reader in readers)


def compose(*readers: Reader, check_alignment: bool = True) -> Reader:
    """Yields tuples of one sample of each reader; samples that are tuples are flattened.

    Raises:
        ComposeNotAligned: while reading, if one ends before the others and that is checked.
    """

    def composed() -> Iterator[tuple[Any, ...]]:
        for samples in itertools.zip_longest(*(reader() for reader in readers), fillvalue=_SHORT):
            if _SHORT not in samples:
                yield sum((x if isinstance(x, tuple) else (x,) for x in samples), ())
            elif check_alignment:
                raise ComposeNotAligned("one of the composed readers has fewer samples")
            else:
                return

    return composed


def firstn(reader: Reader, n: int) -> Reader:
    """Yields the first `n` samples."""
    return lambda: itertools.islice(reader(), n)


def cache(reader: Reader) -> Reader:
    """Reads all samples now, and yields them from memory."""
    samples = tuple(reader())
    return lambda: iter(samples)


def buffered(reader: Reader, size: int) -> Reader:
    """Reads up to `size` samples ahead, in a thread."""

    def samples() -> Iterator[Any]:
        ahead = Prefetcher(reader, size)
        try:
            while True:
                try:
                    sample = ahead.take()
                except StopIteration:
                    return
                yield sample
        finally:
            ahead.stop()

    return samples
