"""The source of an operator: a line of the user's program, and the pass that created it."""

import linecache
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_CALLERS = 24  # frames kept around a line, the outermost; a recursion may have thousands


class Frame(NamedTuple):
    """A call in the user's program: the line that calls, and the function around it."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program.

    Attributes:
        file: the file's path, as Python reports it.
        line: counted from 1.
        function: the function that contains the line.
        scope: the modules around it, from jax's name stack: `CNN/Conv_0`.
        made_by: the pass that inserted the operator, or empty if the user wrote it.
        callers: the user's calls that lead to the function, the outermost first; at most
            `MOST_CALLERS`. Neither printed nor compared.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    scope: str = ""
    made_by: str = ""
    callers: tuple[Frame, ...] = field(default=(), compare=False, repr=False)

    def place(self) -> str:
        """Returns `app/train.py:14`, the only form of a line in messages; or an empty string."""
        return f"{short_path(self.file)}:{self.line}" if self.file else ""

    def where(self) -> str:
        """Returns `app/train.py:14, in build_model` with the line's text under it."""
        if not self.file:
            return ""
        place = f"{self.place()}, in {self.function}"
        lines = source_lines(self.file)
        code = lines[self.line - 1].strip() if 0 < self.line <= len(lines) else ""
        return f"{place}\n    {code}" if code else place

    def comment(self) -> str:
        """Returns the comment in IR text: `app/train.py:14, in build_model; by dce`."""
        place = f"{self.place()}, in {self.function}" if self.file else ""
        scope = f"at {self.scope}" if self.scope else ""
        made_by = f"by {self.made_by}" if self.made_by else ""
        text = "; ".join(part for part in (place, scope, made_by) if part)
        return text if text.isprintable() else " ".join(text.split())


def source_lines(path: str) -> list[str]:
    """Returns the lines of a file of the user's program, or none where it cannot be read."""
    try:
        return linecache.getlines(path)
    except ValueError:  # a program that was read from text may name what cannot be a path
        return []


def short_path(path: str) -> str:
    """Returns the last two components of a path."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])
