"""Pipelines as text: `slice_var{min_block_size=8192},dispatch`.

A pass is its name, followed in braces by the options that are not at their defaults. A value is a
number, `true`, `false`, `none`, a word, a string in double quotes, or a list of values in brackets.
"""

import math
from collections.abc import Iterable

from jaxfleet.errors import JaxfleetError, PassError
from jaxfleet.ir.attributes import Word
from jaxfleet.ir.lexer import Line
from jaxfleet.ir.naming import is_plain
from jaxfleet.ir.value_parser import read_attr, read_items
from jaxfleet.pipeline.base import Pass
from jaxfleet.pipeline.options import given_options, option_text
from jaxfleet.pipeline.registry import make_pass

_HINT = 'pipelines read like a,b{option=1,other="text"}'


def parse_pipeline(text: str) -> tuple[Pass, ...]:
    """Parses a pipeline; `parse_pipeline(pipeline_text(passes)) == passes`.

    Raises:
        PassError: a syntax error, or an unknown pass or option.
    """
    line = _PipelineText(text)
    line.check_nesting()
    passes: list[Pass] = []
    while line.peek():
        if passes:
            line.expect(",")
        passes.append(_read_pass(line))
    return tuple(passes)


def pipeline_text(passes: Iterable[Pass]) -> str:
    """Returns passes as text, with the options that are not at their defaults."""
    return ",".join(map(pass_text, passes))


def pass_text(pass_: Pass) -> str:
    """Returns one pass as text: `slice_var{min_block_size=8192}`."""
    given = given_options(pass_)
    options = ",".join(f"{name}={option_text(value)}" for name, value in given.items())
    return f"{pass_.name}{{{options}}}" if options else pass_.name


class _PipelineText(Line):
    has_comments = False

    def word(self, what: str) -> str:
        if not is_plain(self.peek()):
            raise self.expected(f"the name of {what}")
        return self.next()

    def wrong(self, what: str, *, hint: str | None = None) -> JaxfleetError:
        what = f"pipeline: {what} at column {self.column}: {self.text}"
        return PassError(what, hint=hint or _HINT)


def _read_pass(line: _PipelineText) -> Pass:
    name = line.word("a pass")
    options: dict[str, object] = {}
    if line.take("{"):
        while not line.take("}"):
            if options:
                line.expect(",")
            option = line.word("an option")
            if option in options:
                raise PassError(f"{name}: option '{option}' is given twice")
            line.expect("=")
            options[option] = _read_value(line)
    return make_pass(name, options)


def _read_value(line: Line) -> object:
    if line.take("["):
        return read_items(line, "]", _read_value)
    value = read_attr(line)
    if not isinstance(value, Word):
        return value
    if line.take(":"):  # an endpoint
        return f"{value}:{line.next()}"
    return math.nan if value == Word("nan") else value.text
