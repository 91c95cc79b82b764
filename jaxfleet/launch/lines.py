"""Cuts what a process writes into lines to show, also where no line ends.

A line that is begun and stays so (a prompt) is shown as far as it goes. A progress bar, which goes
back to its line's start for every change, is shown now and then, and as it was in the end.
"""

_LONGEST = 64 * 1024  # bytes; a longer line is shown in pieces
_PROGRESS_EVERY_S = 1.0


class LineCutter:
    """Cuts one stream. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._begun = b""
        self._continued = False  # the line's beginning was shown already
        self._bar = ""  # as last shown
        self._bar_at = -_PROGRESS_EVERY_S

    def feed(self, data: bytes, now: float) -> list[str]:
        """Takes what came, and returns the lines that can be shown."""
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
        """Returns what stands in a line that was begun, once nothing came for a while."""
        if b"\r" in self._begun:
            return self._show_bar()
        if not self._begun:
            return []
        lines = [_decode(self._begun)]
        self._begun, self._continued = b"", True
        return lines

    def finish(self) -> list[str]:
        """Returns the last line where nothing ended it."""
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
    """Returns what a terminal would show of a line that returns to its start."""
    states = [state for state in line.split(b"\r") if state.strip()]
    return _decode(states[-1]) if states else ""


def _decode(line: bytes) -> str:
    return line.decode(errors="replace")
