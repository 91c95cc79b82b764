"""Pipelines: their text, `slice_var{min_block_size=8192},dispatch`, and running them.

A pass is its name, followed in braces by the options that are not at their defaults. A value is a
number, `true`, `false`, `none`, a word, a string in double quotes, or a list of values in brackets.
"""

import math
import time
from collections.abc import Iterable, Sequence

from jaxfleet.errors import JaxfleetError, PassError, VerifyError
from jaxfleet.ir import Program, Rule, verify
from jaxfleet.ir.attributes import Word
from jaxfleet.ir.lexer import Line
from jaxfleet.ir.naming import is_plain
from jaxfleet.ir.value_parser import read_attr, read_items
from jaxfleet.pipeline.instruments import Instrument, Stage
from jaxfleet.pipeline.registry import Pass, given_options, make_pass, option_text

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


def run_pipeline(
    program: Program,
    passes: Iterable[Pass],
    *,
    instruments: Iterable[Instrument] = (),
    rules: Iterable[Rule] = (),
) -> Program:
    """Returns the program after all passes, verified before the first and after each.

    Args:
        program: the input of the first pass.
        passes: run in this order.
        instruments: each is called with one Stage for the input and one for each pass, also for a
            program that fails verification, so that a dump ends with it.
        rules: rules for the verifier beyond the structural ones.

    Raises:
        PassError: a pass precedes one that it runs after.
        VerifyError: the program breaks a rule; a note names the pass that broke it.
    """
    passes, rules, instruments = tuple(passes), tuple(rules), tuple(instruments)
    _check_order(passes)
    started = time.perf_counter()
    verify(program, more_rules=rules)
    verified = time.perf_counter()
    _tell(instruments, Stage(0, None, program, program, 0.0, verified - started))
    for index in range(1, len(passes) + 1):
        program = _run_one(index, passes, program, instruments, rules)
    return program


def _run_one(
    index: int,
    passes: Sequence[Pass],
    before: Program,
    instruments: Sequence[Instrument],
    rules: Sequence[Rule],
) -> Program:
    pass_ = passes[index - 1]
    started = time.perf_counter()
    try:
        after = pass_.run(before)
    except Exception as error:
        error.add_note(_where(index, passes))
        raise
    ran = time.perf_counter()
    broken = _broken_rule(before, after, rules)
    verified = time.perf_counter()
    _tell(instruments, Stage(index, pass_, before, after, ran - started, verified - ran))
    if broken is not None:
        broken.add_note(_where(index, passes))
        raise broken
    return after


def _broken_rule(before: Program, after: Program, rules: Sequence[Rule]) -> VerifyError | None:
    if after is before:  # unchanged, so already verified
        return None
    try:
        verify(after, more_rules=rules)
    except VerifyError as error:
        return error
    return None


def _tell(instruments: Sequence[Instrument], stage: Stage) -> None:
    for instrument in instruments:
        instrument(stage)


def _where(index: int, passes: Sequence[Pass]) -> str:
    note = f"  in pass {index} of {len(passes)}, {pass_text(passes[index - 1])}"
    ran = ", ".join(map(pass_text, passes[: index - 1]))
    return f"{note}, after {ran}" if ran else f"{note}, the first"


def _check_order(passes: Sequence[Pass]) -> None:
    later = [pass_.name for pass_ in passes]
    for pass_ in passes:
        later.remove(pass_.name)
        for other in pass_.runs_after:
            if other in later:
                what = f"{pass_.name} stands before {other}, and must run after it"
                raise PassError(what, hint=f"move {pass_.name} behind {other}")
