"""Tokens of one line of IR text, from left to right.

A word is a name, a number, a quoted string, a type (`f32[b,784]`), a size (`<2*b>`), a mark, or a
comment. Anything else is a word of one character, which the parser rejects at its position.
"""

import json
import re
from functools import lru_cache
from typing import ClassVar

from jaxfleet.errors import JaxfleetError, TextError
from jaxfleet.ir.naming import is_plain

_NUMBER = r"[0-9][0-9.]*(?:[eE][+-]?[0-9]+)?"
_WORD = re.compile(
    rf"""
    "(?:[^"\\]|\\.)*"(?:\[[^\]]*\])?                     # a string; a type whose dtype is odd
  | [A-Za-z_][\w./@$~+-]*(?:<[^>]*>)?(?:\[[^\]]*\])?     # a name, a dtype such as key<fry>, a type
  | -?(?:{_NUMBER}|inf|nan)(?:\+-?(?:{_NUMBER}|inf|nan)i)?
  | <[^>]*>
  | ->
  | \#.*
  | \S
    """,
    re.VERBOSE,
)
MOST_NESTED = 64  # nested brackets, parentheses or blocks: far beyond any program
_BEYOND = ("", "", "", "")  # so that looking ahead needs no end-of-line test


_OPENING, _CLOSING = frozenset("[{("), frozenset("]})")
_SHOWN = 1000  # characters of a line


class Line:
    """The words of one line.

    Attributes:
        text: the whole line.
        number: its number in the text, counted from 1.
        comment: from `#` on, or empty.
        empty: whether it has no words.
    """

    __slots__ = ("_at", "_words", "comment", "empty", "number", "text")
    words: ClassVar = _WORD
    has_comments: ClassVar = True

    def __init__(self, text: str, number: int = 1) -> None:
        self.text = text
        self.number = number
        self._words: list[str] = self.words.findall(text)
        self.comment = ""
        if self.has_comments and self._words and self._words[-1][0] == "#":
            self.comment = self._words.pop()
        self.empty = not self._words
        self._words += _BEYOND
        self._at = 0

    def check_nesting(self) -> None:
        """Raises a TextError if brackets are nested too deeply to parse by recursion."""
        if len(self._words) <= MOST_NESTED:
            return
        depth = 0
        for word in self._words:
            depth += (word in _OPENING) - (word in _CLOSING)
            if depth > MOST_NESTED:
                raise self.wrong(f"more than {MOST_NESTED} brackets in each other")

    @property
    def code(self) -> str:
        return self.text.removesuffix(self.comment).strip()

    def peek(self, ahead: int = 0) -> str:
        """Returns an upcoming word, at most three after the next, or an empty string."""
        return self._words[self._at + ahead]

    def next(self) -> str:
        """Takes the next word; raises a TextError at the end of the line."""
        word = self._words[self._at]
        if not word:
            raise self.expected("more")
        self._at += 1
        return word

    def take(self, word: str) -> bool:
        """Takes the next word if it is this one; returns whether it was."""
        if self._words[self._at] != word:
            return False
        self._at += 1
        return True

    def expect(self, word: str) -> None:
        """Takes the next word, which must be this one."""
        if self._words[self._at] != word:
            raise self.expected(f"'{word}'")
        self._at += 1

    def name(self) -> str:
        """Takes a name, quoted or bare."""
        name = name_of(self._words[self._at])
        if name is None:
            raise self.expected("a name")
        self._at += 1
        return name

    def integer(self) -> int:
        """Takes a number without a point."""
        word = self._words[self._at]
        if not word.removeprefix("-").isdecimal():
            raise self.expected("a whole number")
        self._at += 1
        return int(word)

    def skip(self) -> None:
        """Takes all remaining words."""
        self._at = len(self._words) - len(_BEYOND)

    def end(self) -> None:
        """Checks that no words remain."""
        if self._words[self._at]:
            raise self.expected("the end of the line")

    @property
    def column(self) -> int:
        """The column of the next word, counted from 1."""
        starts = [match.start() for match in self.words.finditer(self.text)]
        return [*starts, len(self.text)][min(self._at, len(starts))] + 1

    def expected(self, what: str, *, hint: str | None = None) -> JaxfleetError:
        """Returns the error for a next word that is not the expected one."""
        word = self._words[self._at]
        found = f"'{word}'" if word else "the end"
        return self.wrong(f"expected {what}, found {found}", hint=hint)

    def wrong(self, what: str, *, hint: str | None = None) -> JaxfleetError:
        """Returns an error about this line."""
        text = self.text.strip()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return TextError(f"line {self.number}: {what}: {shown}", hint=hint)


@lru_cache(maxsize=1 << 16)
def name_of(word: str) -> str | None:
    """Returns the name in a word, unquoted, or None if it is not a name."""
    return string_of(word) if word[:1] == '"' else word if is_plain(word) else None


def string_of(word: str) -> str | None:
    """Returns the value of a quoted word, or None if it is not a string."""
    if len(word) < 2 or word[0] != '"' or word[-1] != '"':
        return None
    try:
        text: str = json.loads(word)
    except ValueError:  # such as an escape that JSON lacks
        return None
    return text
