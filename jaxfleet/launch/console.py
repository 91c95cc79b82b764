"""Where the lines of all processes come together, each under its process's name."""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 31)  # of the terminal: cyan, yellow, green, magenta, blue, red
_OWN = "launch"


class Console:
    """Writes whole lines to this process's stdout and stderr. Any thread may use it.

    Args:
        names: of all processes; prefixes are as wide as the widest of them needs.
        on_closed: called once nobody reads the output any more; after that, lines are dropped.
        quiet: leaves out what the launch itself says, but for complaints.
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
        """Writes lines under a process's name, to stderr where they came from its stderr."""
        stream = self._streams[1 if error else 0]
        prefix = self._prefix(name, colour=stream.isatty())
        shown = [f"{prefix}{line}\n" for line in lines]
        with self._lock:
            self._lines += len(shown)
            self._last_line[name] = self._lines
        self._write(stream, "".join(shown))

    def lines_since(self, name: str) -> int:
        """The number of lines of others that were shown after a process's last one."""
        with self._lock:
            return self._lines - self._last_line.get(name, 0)

    def say(self, text: str) -> None:
        """Writes what the launch itself has to say: to stderr."""
        if not self._quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        """Writes what the launch has to say of a failure."""
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
            except OSError:  # a pipe whose reader is gone, a terminal that was closed
                self._closed = True
                self._on_closed()
