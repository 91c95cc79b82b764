"""Reads files ahead in threads, and gives their samples in the files' order.

So many files as there are threads are read at once, a few blocks ahead of whoever takes the
samples. The order is that of the list whatever thread is quick, so that two runs over the same
files are the same.
"""

import queue
import threading
from collections.abc import Iterator, Sequence

from jaxfleet.fluid.dataset.files import blocks
from jaxfleet.fluid.dataset.multi_slot import parse, parse_named
from jaxfleet.fluid.dataset.slots import Samples, Slot

_AHEAD = 4  # blocks of a file that wait to be taken
_LOOK_S = 0.1  # after which a thread that waits looks whether it is still wanted

_Item = Samples | Exception | None  # some samples, what was raised, or the end


class _File:
    """One file of the list, and what is read of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.read: queue.Queue[_Item] = queue.Queue(_AHEAD)


def read_files(
    paths: Sequence[str],
    slots: Sequence[Slot],
    command: tuple[str, ...],
    threads: int,
    groups: int = 0,
) -> Iterator[Samples]:
    """Yields the samples of files, in order, some at a time.

    Args:
        paths: the files'.
        slots: of a line.
        command: what each file is piped through.
        threads: how many files are read at once.
        groups: how many words with their counts stand before the slots: an id, a content.

    Raises:
        FeedError: a file cannot be read, or holds something else.
    """
    files, stopped = [_File(path) for path in paths], threading.Event()
    waiting: queue.SimpleQueue[_File] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)
    readers = [
        threading.Thread(target=_read, args=(waiting, slots, command, groups, stopped), daemon=True)
        for _ in range(min(threads, len(files)))
    ]
    for reader in readers:
        reader.start()
    try:
        for file in files:
            while (item := file.read.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        stopped.set()
        for reader in readers:
            reader.join()


def _read(
    waiting: "queue.SimpleQueue[_File]",
    slots: Sequence[Slot],
    command: tuple[str, ...],
    groups: int,
    stopped: threading.Event,
) -> None:
    """Reads one file after another until there is none, or nobody wants more."""
    while not stopped.is_set():
        try:
            file = waiting.get_nowait()
        except queue.Empty:
            return
        end: _Item = None
        found = blocks(file.path, command, stopped.is_set)
        try:
            for text, line in found:
                if not _put(file, _parsed(text, slots, file.path, line, groups), stopped):
                    break
        except Exception as error:  # noqa: BLE001  # whoever takes the samples gets it
            end = error
        finally:
            found.close()
        _put(file, end, stopped)


def _parsed(text: bytes, slots: Sequence[Slot], path: str, line: int, groups: int) -> Samples:
    if groups:
        return parse_named(text, slots, path, line, groups)
    return parse(text, slots, path, line)


def _put(file: _File, item: _Item, stopped: threading.Event) -> bool:
    """Waits for room; returns whether there was some before nobody wanted more."""
    while not stopped.is_set():
        try:
            file.read.put(item, timeout=_LOOK_S)
            return True
        except queue.Full:
            continue
    return False


def batches(parts: Iterator[Samples], size: int) -> Iterator[Samples]:
    """Yields samples in batches; the last has what is left."""
    held: list[Samples] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(part)
        if count < size:
            continue
        whole = Samples.joined(held)
        full = count - count % size
        for start in range(0, full, size):
            yield whole.part(start, start + size)
        held, count = ([whole.part(full, count)] if count > full else []), count - full
    if count:
        yield Samples.joined(held)
