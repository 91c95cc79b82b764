"""Less frequent garbage collection during tracing, whose objects are long-lived."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_OBJECTS = 50_000  # allocations between two collections; Python's default is 700


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Runs the cyclic garbage collector rarely until the block ends.

    A collection walks live objects, and nearly all objects of a trace are live: it took 30 % of the
    CPU seconds of distributing two nets of scanned layers, and takes a tenth when it runs rarely.
    Garbage stays bounded. Only the main thread changes this process-wide setting, so that it can
    restore it.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
