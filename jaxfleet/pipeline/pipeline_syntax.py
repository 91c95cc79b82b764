"""Pipelines as text: `slice_var{min_block_size=8192},dispatch`.

A pass is its name, followed in braces by the options that are not at their defaults. A value is a
number, `true`, `false`, `none`, a word, a string in double quotes, or a list of values in brackets.
"""

import json
import re
from collections.abc import Iterable

from jaxfleet.errors import PassError
from jaxfleet.pipeline.base import Pass
from jaxfleet.pipeline.options import given_options, option_text
from jaxfleet.pipeline.registry import make_pass

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf|nan)(?![\w./:@$~]))
  | (?P<word>[A-Za-z_][\w./:@$~+-]*)
  | (?P<mark>[{}\[\]=,])
  | (?P<end>$)
    )""",
    re.VERBOSE,
)
_WORDS: dict[str, object] = {"true": True, "false": False, "none": None}


def parse_pipeline(text: str) -> tuple[Pass, ...]:
    """Parses a pipeline; `parse_pipeline(pipeline_text(passes)) == passes`.

    Raises:
        PassError: a syntax error, or an unknown pass or option.
    """
    return _Parser(text).pipeline()


def pipeline_text(passes: Iterable[Pass]) -> str:
    """Returns passes as text, with the options that are not at their defaults."""
    return ",".join(map(pass_text, passes))


def pass_text(pass_: Pass) -> str:
    """Returns one pass as text: `slice_var{min_block_size=8192}`."""
    given = given_options(pass_)
    options = ",".join(f"{name}={option_text(value)}" for name, value in given.items())
    return f"{pass_.name}{{{options}}}" if options else pass_.name


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0  # where the next token begins
        self.kind, self.word, self.start = "", "", 0  # the current token
        self._advance()

    def pipeline(self) -> tuple[Pass, ...]:
        passes: list[Pass] = []
        while self.kind != "end":
            if passes:
                self._expect(",")
            passes.append(self._pass())
        return tuple(passes)

    def _pass(self) -> Pass:
        name = self._name("a pass")
        options: dict[str, object] = {}
        if self._take("{"):
            while not self._take("}"):
                if options:
                    self._expect(",")
                option = self._name("an option")
                if option in options:
                    raise PassError(f"{name}: option '{option}' is given twice")
                self._expect("=")
                options[option] = self._value()
        return make_pass(name, options)

    def _value(self) -> object:
        kind, word = self.kind, self.word
        if self._take("["):
            return self._list()
        if kind not in {"string", "number", "word"}:
            raise self._error("a value")
        self._advance()
        if kind == "string":
            return json.loads(word)
        if kind == "number":
            return int(word) if word.lstrip("-").isdigit() else float(word)
        return _WORDS.get(word, word)

    def _list(self) -> tuple[object, ...]:
        items: list[object] = []
        while not self._take("]"):
            if items:
                self._expect(",")
            items.append(self._value())
        return tuple(items)

    def _name(self, what: str) -> str:
        if self.kind != "word":
            raise self._error(f"the name of {what}")
        name = self.word
        self._advance()
        return name

    def _take(self, mark: str) -> bool:
        found = self.kind == "mark" and self.word == mark
        if found:
            self._advance()
        return found

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise self._error(f"'{mark}'")

    def _advance(self) -> None:
        match = _TOKEN.match(self.text, self.place)
        if match is None:
            rest = self.text[self.place :].lstrip()
            self.word, self.start = rest[0], len(self.text) - len(rest)
            raise self._error("a word, a value or one of {}[]=,")
        self.kind = match.lastgroup or ""
        self.word, self.start = match.group(self.kind), match.start(self.kind)
        self.place = match.end()

    def _error(self, expected: str) -> PassError:
        found = f"'{self.word}'" if self.word else "the end"
        what = f"pipeline: expected {expected}, found {found} at column {self.start + 1}"
        return PassError(
            f"{what}: {self.text}", hint='pipelines read like a,b{option=1,other="text"}'
        )
