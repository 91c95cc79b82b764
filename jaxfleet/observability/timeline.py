"""Spans of a job's processes, merged into one timeline for chrome://tracing or Perfetto.

The format is the Trace Event Format: complete events (`X`) in microseconds, and metadata (`M`) with
the names of processes and threads.
"""

import atexit
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from jaxfleet.env import read_trace_dir
from jaxfleet.errors import ProgramError

SUFFIX = ".spans.jsonl"


class Spans:
    """Records nothing: the default without a timeline."""

    def span(self, name: str, /, **facts: object) -> AbstractContextManager[None]:
        """Context whose duration is recorded.

        Args:
            name: the activity.
            **facts: plain values for the reader.
        """
        del name, facts
        return nullcontext()


NO_SPANS = Spans()


class FileSpans(Spans):
    """Writes one line per span to a file of this process.

    Durations are monotonic; their offset is the wall-clock time when the file began. So processes
    of one machine align, and those of several as well as their clocks do.
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
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            took = time.perf_counter_ns() - start
            self._note(name, start, took, facts)

    def close(self) -> None:
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
            if self._file.closed:  # in a thread that outlives the main thread
                return
            try:
                self._write(line)
            except OSError as error:  # a full disk must not end the training
                with suppress(OSError):  # flushing the buffer fails again
                    self._file.close()
                sys.stderr.write(f"jaxfleet: no more of the timeline is noted: {error}\n")

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, default=str) + "\n")


def spans_of(process: str) -> Spans:
    """Returns the recorder of this process's spans: in `JAXFLEET_TRACE_DIR`, or disabled."""
    folder = read_trace_dir()
    return NO_SPANS if folder is None else FileSpans(folder, process)


def _new_file(folder: Path, stem: str) -> TextIO:
    """Creates a new file: a process may connect more than once."""
    for number in itertools.count():
        name = f"{stem}{f'.{number}' if number else ''}{SUFFIX}"
        try:
            # Line-buffered, so that no span is lost, however the process ends.
            return (folder / name).open("x", encoding="utf-8", buffering=1)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


@dataclass(frozen=True)
class Noted:
    """Spans of one process."""

    process: str
    spans: tuple[dict[str, Any], ...]


def merge(folder: Path) -> dict[str, Any]:
    """Returns the merged timeline of a folder's files, in Chrome's format.

    Raises:
        ProgramError: it contains no file of spans, or a file of another format.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        hint = "run the job with JAXFLEET_TRACE_DIR set to it"
        raise ProgramError(f"{folder} has no file of spans", hint=hint)
    noted = _by_process(map(_read, files))
    begin = min((s["start_us"] for one in noted for s in one.spans), default=0.0)
    events = [event for pid, one in enumerate(noted) for event in _events(pid, one, begin)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _by_process(found: Iterable[Noted]) -> list[Noted]:
    """Joins the files of one process, and those of its successors with the same name."""
    spans: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        spans.setdefault(one.process, []).extend(one.spans)
    return [Noted(name, tuple(spans[name])) for name in sorted(spans)]


def _read(file: Path) -> Noted:
    """Reads one file; ignores a last line that a killed process left unfinished."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        head, *spans = map(json.loads, lines)
        found = map(_checked, spans)
        return Noted(str(head["process"]), tuple(span for span in found if span["took_us"] >= 0))
    except (ValueError, KeyError, TypeError) as error:
        raise ProgramError(f"{file} is not a file of spans: {error}") from error


def _checked(span: Any) -> dict[str, Any]:
    texts = {name: str(span[name]) for name in ("name", "thread")}
    times = {name: float(span[name]) for name in ("start_us", "took_us")}
    return {**texts, **times, "facts": dict(span["facts"])}


def _events(pid: int, noted: Noted, begin_us: float) -> Iterator[dict[str, Any]]:
    """Yields the events of one process; times count from the beginning of the job."""
    yield _name("process_name", pid, 0, noted.process)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    names = dict.fromkeys(span["thread"] for span in noted.spans)
    threads = {name: tid for tid, name in enumerate(names)}
    for name, tid in threads.items():
        yield _name("thread_name", pid, tid, name)
    for span in noted.spans:
        yield {
            "ph": "X",
            "name": span["name"],
            "pid": pid,
            "tid": threads[span["thread"]],
            "ts": span["start_us"] - begin_us,
            "dur": span["took_us"],
            "args": span["facts"],
        }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
