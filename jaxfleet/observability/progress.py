"""Progress of work that takes a while: one line that updates, on a terminal or in a notebook.

Elsewhere, as in log files and launched processes, what is reported goes to the log. Nothing appears
of work that ends within two seconds, and nothing stays of a line when the work ends.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from jaxfleet.env import read_shows_progress
from jaxfleet.notebook import element, shown
from jaxfleet.observability.notices import is_configured, notify
from jaxfleet.observability.plain_text import printable

QUIET_S = 2.0
_EVERY_S = 0.25  # between two looks at what the line should be
_BAR = 20  # characters of a bar on a terminal
_NARROWEST, _WIDEST = 20, 200  # columns of a line


class Screen(Protocol):
    """Where a line of progress is drawn."""

    def draw(self, text: str, share: float | None) -> None:
        """Replaces the line; `share` is the part of the work that is done, if known."""

    def clear(self) -> None:
        """Removes the line."""


class Progress:
    """Progress of work, shown once it has taken a while and until it ends.

    Within `with`, it is a line on the terminal or in the notebook, if there is one; otherwise, and
    where the program configures logging, each report is a notice. `JAXFLEET_PROGRESS=0` turns both
    off. Of nested ones the innermost is shown.

    Args:
        what: names the work: `memory_budget of 'train_step'`.
        quiet_s: seconds without notices; work that ends by then is not worth a line.
        clock: seconds, as `time.monotonic` counts them.
        line: the line that it shares with all other work.
    """

    def __init__(
        self,
        what: str,
        *,
        quiet_s: float = QUIET_S,
        clock: Callable[[], float] = time.monotonic,
        line: "LiveLine | None" = None,
    ) -> None:
        self._what, self._quiet_s, self._clock = what, quiet_s, clock
        self._line = line if line is not None else _SHARED
        self._is_on, self._is_live = read_shows_progress(), False
        self._began, self._text = clock(), ""
        self.share: float | None = None

    def show(self, text: str) -> None:
        """Sets the activity that the line shows."""
        self._text, self.share = text, None

    def report(self, text: str, *, share: float | None = None) -> None:
        """Does the same, and logs it where no line is shown.

        Args:
            text: what is being done, or was found.
            share: the part of the work that is done, from 0 to 1, if known.
        """
        self._text, self.share = text, share
        if not self._is_on or (self._is_live and not is_configured()):
            return
        if (said := self.text()) is not None:
            with self._line.hidden():
                notify(said)

    def text(self) -> str | None:
        """Returns the line, without a bar; None while the work has not taken long."""
        seconds = self._clock() - self._began
        if seconds < self._quiet_s:
            return None
        doing = f": {self._text}" if self._text else ""
        return f"{self._what}{doing} ({seconds:.0f} s so far)"

    def __enter__(self) -> Self:
        self._began = self._clock()
        self._is_live = self._is_on and self._line.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._is_live:
            self._is_live = False
            self._line.end(self)


class LiveLine:
    """The line of a process, and the thread that draws it while there is work.

    Args:
        find: returns where to draw; None if nowhere.
        every_s: seconds between drawings; None draws only at `tick`, for tests.
    """

    def __init__(
        self, find: Callable[[], Screen | None], *, every_s: float | None = _EVERY_S
    ) -> None:
        self._find, self._every_s = find, every_s
        self._news = threading.Condition(threading.RLock())
        self._work: list[Progress] = []  # the innermost last
        self._screen: Screen | None = None
        self._drawn: tuple[str, float | None] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, progress: Progress) -> bool:
        """Adds work; returns whether its line will be drawn."""
        with self._news:
            if not self._work:
                self._screen = self._find()
            if self._screen is None:
                return False
            self._work.append(progress)
            if self._thread is None and self._every_s is not None:
                self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
                self._thread.start()
            return True

    def end(self, progress: Progress) -> None:
        """Removes work, and its line."""
        with self._news:
            if progress in self._work:  # not in a fork, whose parent has begun it
                self._work.remove(progress)
            self.tick()
            self._news.notify_all()

    def tick(self) -> None:
        """Draws the line of the innermost work that has taken long, or removes it."""
        with self._news, suppress(OSError, ValueError):  # a terminal that was closed
            found = None
            for progress in self._work:
                if (text := progress.text()) is not None:
                    found = text, progress.share
            if found == self._drawn or self._screen is None:
                return
            self._drawn = found
            if found is None:
                self._screen.clear()
            else:
                self._screen.draw(*found)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context without the line, for what others write; other threads' drawing waits."""
        with self._news:
            if self._drawn is not None and self._screen is not None:
                self._drawn = None
                with suppress(OSError, ValueError):
                    self._screen.clear()
            yield

    def forget(self) -> None:
        """Starts anew in a fork: the parent's thread, which may hold the lock, is not there."""
        self._news = threading.Condition(threading.RLock())
        self._work, self._screen, self._drawn, self._thread = [], None, None, None

    def _run(self) -> None:
        with self._news:
            while self._work:
                self.tick()
                self._news.wait(self._every_s)
            self._thread = None


class Terminal:
    """A line at the end of what a terminal shows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._length = stream, 0

    def draw(self, text: str, share: float | None) -> None:
        if share is not None:
            done = round(_BAR * min(1.0, max(0.0, share)))
            text = f"[{'#' * done}{'-' * (_BAR - done)}] {text}"
        line = f"jaxfleet: {printable(text)}"[: self._columns() - 1]
        # Blanks instead of an escape sequence: every terminal has them.
        self._stream.write(f"\r{line}{' ' * (self._length - len(line))}")
        self._stream.flush()
        self._length = len(line)

    def clear(self) -> None:
        self._stream.write(f"\r{' ' * self._length}\r")
        self._stream.flush()
        self._length = 0

    def _columns(self) -> int:
        try:
            found = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            found = 80
        return min(_WIDEST, max(_NARROWEST, found or 80))


class Notebook:
    """An output of the running cell, which is replaced until the work ends.

    Args:
        display: IPython's `display`.
    """

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display, self._handle = display, None

    def draw(self, text: str, share: float | None) -> None:
        given = {} if share is None else {"value": f"{share:.3f}", "max": "1"}
        bar = element("progress", **given, aria_label="progress")
        self._put(shown(bar, " ", element("span", text)), text)

    def clear(self) -> None:
        self._put("", "")

    def _put(self, markup: str, text: str) -> None:
        data = {"text/html": markup, "text/plain": text}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def find_screen() -> Screen | None:
    """Returns the notebook or the terminal of this process, if it has one."""
    ipython = sys.modules.get("IPython")  # a notebook's process has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is not None:
        from IPython.display import display  # noqa: PLC0415  # only there

        return Notebook(display)
    stream = sys.stderr
    with suppress(AttributeError, ValueError):  # none, or closed
        if stream.isatty():
            return Terminal(stream)
    return None


_SHARED = LiveLine(find_screen)
os.register_at_fork(after_in_child=_SHARED.forget)
