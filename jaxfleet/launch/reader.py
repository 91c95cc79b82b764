"""Reads one stream of one process for as long as anybody holds its other end."""

import os
import select
import threading
import time
from collections import deque
from typing import IO, BinaryIO

from jaxfleet.launch.console import Console
from jaxfleet.launch.lines import LineCutter

_CHUNK = 64 * 1024
_QUIET_MS = 1000  # after this a line that was begun is shown
_LONGEST = 1 << 20  # bytes kept of a line for the log file


class Reader:
    """Shows what a stream brings, in a thread of its own, and keeps the last lines.

    Args:
        stream: the end of a pipe; it is closed when all was read.
        name: the process's.
        console: where lines are shown.
        last: where the last lines are kept; the process's other stream puts its lines there too.
        log: the file that gets all bytes, line by line, or none; a last line that nothing ended is
            ended there.
        error: it is the process's stderr.
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

    def finish(self, timeout_s: float) -> None:
        """Waits for the end of the stream, which a process that escaped may keep open."""
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
        """Writes whole lines, so that no line mixes what came from both streams."""
        if self._log is None:
            return
        unlogged = self._unlogged + data
        if whole and unlogged:
            unlogged += b"\n"
        cut = len(unlogged)
        if not whole and cut < _LONGEST:
            cut = unlogged.rfind(b"\n") + 1
        self._unlogged = unlogged[cut:]
        try:
            self._log.write(unlogged[:cut])
        except OSError as error:  # a full disk must not end the process
            self._log = None
            self._console.say(f"{self._name}: no more of its log is written: {error}")
