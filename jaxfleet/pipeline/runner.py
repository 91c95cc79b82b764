"""Runs of pipelines: one pass after the other, verified and observed."""

import time
from collections.abc import Iterable, Sequence

from jaxfleet.errors import PassError, VerifyError
from jaxfleet.ir import Program, Rule, verify
from jaxfleet.pipeline.base import Pass
from jaxfleet.pipeline.instruments import Instrument, Stage
from jaxfleet.pipeline.text import pass_text


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
