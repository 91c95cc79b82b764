"""Notes when a process did what; `timeline.py` makes one picture of what all processes noted."""

import atexit
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from jaxfleet.env import read_trace_dir

SUFFIX = ".spans.jsonl"


class Spans:
    """Notes nothing: what is used where nobody asked for a timeline."""

    def span(self, name: str, /, **facts: object) -> AbstractContextManager[None]:
        """Returns a context whose duration is noted.

        Args:
            name: what the process does in it.
            **facts: what else a reader may want to know; plain values.
        """
        del name, facts
        return nullcontext()


NO_SPANS = Spans()


class FileSpans(Spans):
    """Writes a line a span to a file of this process's own.

    Spans are timed by a clock that never goes back, and placed by the clock on the wall as it was
    when the file began: processes of one machine fit together, those of several as well as their
    clocks do.

    Args:
        folder: where a file of this process's own is made.
        process: this process's name in the picture: `trainer 0`.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, process: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _new_file(folder, f"{process.replace(' ', '-')}-{os.getpid()}")
        self._lock = threading.Lock()
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._write({"process": process})
        atexit.register(self.close)

    @contextmanager
    def span(self, name: str, /, **facts: object) -> Iterator[None]:
        """Notes how long a context took."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            took = time.perf_counter_ns() - start
            self._note(name, start, took, facts)

    def close(self) -> None:
        """Closes the file."""
        with self._lock, suppress(OSError):
            self._file.close()
        atexit.unregister(self.close)

    def _note(self, name: str, start_ns: int, took_ns: int, facts: dict[str, object]) -> None:
        line = {
            "name": name,
            "start_us": (start_ns + self._offset_ns) / 1000,
            "took_us": took_ns / 1000,
            "thread": threading.current_thread().name,
            "facts": facts,
        }
        with self._lock:
            if self._file.closed:  # a thread that outlives the end of the process
                return
            try:
                self._write(line)
            except OSError as error:  # a full disk must not end the training
                with suppress(OSError):  # what is left in the buffer fails again
                    self._file.close()
                sys.stderr.write(f"jaxfleet: no more of the timeline is noted: {error}\n")

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, default=str) + "\n")


def spans_of(process: str) -> Spans:
    """Returns what notes this process's spans: in `JAXFLEET_TRACE_DIR`, or nowhere.

    Args:
        process: its name: `trainer 0`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = read_trace_dir()
    return NO_SPANS if folder is None else FileSpans(folder, process)


def _new_file(folder: Path, stem: str) -> TextIO:
    """Opens a file that was not there: a process may connect more than once."""
    for number in itertools.count():
        name = f"{stem}{f'.{number}' if number else ''}{SUFFIX}"
        try:
            # By lines: nothing that was noted is lost, however the process ends.
            return (folder / name).open("x", encoding="utf-8", buffering=1)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")
