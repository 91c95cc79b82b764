"""Makes one timeline of what the processes of a job noted, for chrome://tracing or Perfetto.

The form is the Trace Event Format's: complete events (`X`) in microseconds, and metadata (`M`) that
names processes and threads.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.watch.spans import SUFFIX


@dataclass(frozen=True)
class Noted:
    """What one process noted.

    Attributes:
        process: its name.
        spans: a dict for each, as `FileSpans` writes them.
    """

    process: str
    spans: tuple[dict[str, Any], ...]


def merge(folder: Path) -> dict[str, Any]:
    """Returns the timeline of a folder's files, as Chrome reads it.

    Args:
        folder: what `JAXFLEET_TRACE_DIR` was.

    Raises:
        ProgramError: there is no file of spans in it, or one that is something else.
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
    """Joins what one process noted in several files, and what came after it under its name."""
    spans: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        spans.setdefault(one.process, []).extend(one.spans)
    return [Noted(name, tuple(spans[name])) for name in sorted(spans)]


def _read(file: Path) -> Noted:
    """Reads one file; a last line that a killed process left unfinished does not count.

    Raises:
        ProgramError: something else is wrong with it.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        head, *spans = map(json.loads, lines)
        found = map(_checked, spans)
        return Noted(str(head["process"]), tuple(span for span in found if span["took_us"] >= 0))
    except (ValueError, KeyError, TypeError) as error:
        raise ProgramError(f"{file} is no file of spans: {error}") from error


def _checked(span: Any) -> dict[str, Any]:
    """Returns what a line says of a span, with all that an event is made of."""
    texts = {name: str(span[name]) for name in ("name", "thread")}
    times = {name: float(span[name]) for name in ("start_us", "took_us")}
    return {**texts, **times, "facts": dict(span["facts"])}


def _events(pid: int, noted: Noted, begin_us: float) -> Iterator[dict[str, Any]]:
    """Yields the events of one process; times count from the job's first."""
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
