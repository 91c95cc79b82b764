"""Output of processes: split into lines, each shown under its process's name.

An unfinished line (a prompt) is shown as it is after a pause. A progress bar, which returns to the
start of its line for every change, is shown from time to time, and in its final state.
"""

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import IO, BinaryIO, TextIO

_LONGEST = 64 * 1024  # bytes; a longer line is shown in pieces
_PROGRESS_EVERY_S = 1.0


def counted(number: int, what: str) -> str:
    """Returns a number with what it counts.

    >>> counted(1, "server"), counted(3, "trainer")
    ('1 server', '3 trainers')
    """
    return f"{number} {what}{'s' * (number != 1)}"


class LineCutter:
    """Splits one stream into lines. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._begun = b""
        self._continued = False  # the beginning of the line was shown already
        self._bar = ""  # as last shown
        self._bar_at = -_PROGRESS_EVERY_S

    def feed(self, data: bytes, now: float) -> list[str]:
        """Adds data, and returns the lines that can be shown."""
        *whole, begun = (self._begun + data).split(b"\n")
        lines: list[str] = []
        for line in whole:
            lines += self._end_line(line)
        self._begun = begun
        if b"\r" in begun:
            lines += self._progress(now)
        if len(self._begun) > _LONGEST:
            lines.append(_last_state(self._begun))
            self._begun, self._continued = b"", True
        return lines

    def pause(self) -> list[str]:
        """Returns an unfinished line after a pause in the stream."""
        if b"\r" in self._begun:
            return self._show_bar()
        if not self._begun:
            return []
        lines = [_decode(self._begun)]
        self._begun, self._continued = b"", True
        return lines

    def finish(self) -> list[str]:
        """Returns the last line if it is unfinished."""
        begun, self._begun = self._begun, b""
        return self._end_line(begun) if begun else []

    def _end_line(self, line: bytes) -> list[str]:
        shown, continued, bar = _last_state(line), self._continued, self._bar
        self._continued, self._bar = False, ""
        if (continued and not shown) or (bar and shown == bar):
            return []
        return [shown]

    def _progress(self, now: float) -> list[str]:
        lines = []
        if now - self._bar_at >= _PROGRESS_EVERY_S:
            self._bar_at = now
            lines = self._show_bar()
        *_, before, last = self._begun.split(b"\r")
        self._begun = b"\r" + last if last.strip() else b"\r" + before + b"\r"
        return lines

    def _show_bar(self) -> list[str]:
        bar = _last_state(self._begun)
        if not bar or bar == self._bar:
            return []
        self._bar = bar
        return [bar]


def _last_state(line: bytes) -> str:
    """Returns the visible state of a line with carriage returns."""
    states = [state for state in line.split(b"\r") if state.strip()]
    return _decode(states[-1]) if states else ""


def _decode(line: bytes) -> str:
    return line.decode(errors="replace")


_COLOURS = (36, 33, 32, 35, 34, 31)  # of the terminal: cyan, yellow, green, magenta, blue, red
_OWN = "launch"


class Console:
    """Writes whole lines to this process's stdout and stderr; thread-safe.

    Prefixes have the width of the longest name. `on_closed` is called once the output's reader is
    gone; later lines are dropped. `quiet` drops the launch's own messages, except errors.
    """

    def __init__(
        self, names: Sequence[str], on_closed: Callable[[], None], *, quiet: bool = False
    ) -> None:
        self._quiet = quiet
        everyone = (_OWN, *names)
        self._width = max(len(name) for name in everyone)
        self._colours = {
            name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(everyone) if at
        }
        self._on_closed = on_closed
        self._closed = False
        self._lock = threading.Lock()
        self._streams = (sys.stdout, sys.stderr)
        self._lines = 0
        self._last_line: dict[str, int] = {}

    def show(self, name: str, lines: Iterable[str], *, error: bool = False) -> None:
        stream = self._streams[1 if error else 0]
        prefix = self._prefix(name, colour=stream.isatty())
        shown = [f"{prefix}{line}\n" for line in lines]
        with self._lock:
            self._lines += len(shown)
            self._last_line[name] = self._lines
        self._write(stream, "".join(shown))

    def lines_since(self, name: str) -> int:
        """The number of lines of others since a process's last one."""
        with self._lock:
            return self._lines - self._last_line.get(name, 0)

    def say(self, text: str) -> None:
        if not self._quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        self.show(_OWN, text.splitlines(), error=True)

    def _prefix(self, name: str, *, colour: bool) -> str:
        prefix = f"{name:<{self._width}} |"
        code = self._colours.get(name, 1)
        return f"\033[{code}m{prefix}\033[0m " if colour else f"{prefix} "

    def _write(self, stream: TextIO, text: str) -> None:
        encoding = stream.encoding or "utf-8"
        known = text.encode(encoding, "backslashreplace").decode(encoding)
        with self._lock:
            if self._closed:
                return
            try:
                stream.write(known)
                stream.flush()
            except OSError:  # a pipe without a reader, or a closed terminal
                self._closed = True
                self._on_closed()


_CHUNK = 64 * 1024
_QUIET_MS = 1000  # pause after which an unfinished line is shown
_READER_LONGEST = 1 << 20  # bytes of a line buffered for the log file


class Reader:
    """Shows a stream, in its own thread, and keeps the last lines.

    `log` gets all bytes, in whole lines; an unfinished last line gets a newline.
    """

    def __init__(
        self,
        stream: IO[bytes],
        *,
        name: str,
        console: Console,
        last: deque[str],
        log: BinaryIO | None,
        error: bool,
    ) -> None:
        self._stream, self._name, self._console = stream, name, console
        self._last, self._log, self._error = last, log, error
        self._unlogged = b""
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reads {name}", daemon=True)
        self._thread.start()

    def rename(self, name: str, log: BinaryIO | None) -> None:
        """Shows what follows under another name, and writes it to another log."""
        self._name, self._log = name, log

    def finish(self, timeout_s: float) -> None:
        """Waits for the end of the stream, which a descendant that escaped may keep open."""
        self._thread.join(timeout_s)
        self._given_up.set()
        self._thread.join(2 * _QUIET_MS / 1000)

    def _run(self) -> None:
        lines = LineCutter()
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        with self._stream:
            while not self._given_up.is_set():
                if not poll.poll(_QUIET_MS):
                    self._show(lines.pause())
                elif data := os.read(self._stream.fileno(), _CHUNK):
                    self._show(lines.feed(data, time.monotonic()))
                    self._write_log(data)
                else:
                    break
        self._show(lines.finish())
        self._write_log(b"", whole=True)

    def _show(self, lines: list[str]) -> None:
        if lines:
            self._last.extend(lines)
            self._console.show(self._name, lines, error=self._error)

    def _write_log(self, data: bytes, *, whole: bool = False) -> None:
        """Writes whole lines, so that no line mixes the two streams."""
        if self._log is None:
            return
        unlogged = self._unlogged + data
        if whole and unlogged:
            unlogged += b"\n"
        cut = len(unlogged)
        if not whole and cut < _READER_LONGEST:
            cut = unlogged.rfind(b"\n") + 1
        self._unlogged = unlogged[cut:]
        try:
            self._log.write(unlogged[:cut])
        except OSError as error:  # a full disk must not end the process
            self._log = None
            self._console.say(f"{self._name}: no more of its log is written: {error}")
