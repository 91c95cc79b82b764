"""Running a pipeline: the verifier between passes, stages for instruments, notes on errors."""

from collections.abc import Iterator

import pytest

from jaxfleet.errors import PassError, VerifyError
from jaxfleet.ir import Finding, Operands, Operator, Program
from jaxfleet.pipeline import Record, Stage, parse_pipeline, run_pipeline
from tests.pipeline.toys import TOY

pytestmark = pytest.mark.usefixtures("toy_passes")


def run(pipeline: str, program: Program = TOY) -> Record:
    record = Record()
    run_pipeline(program, parse_pipeline(pipeline), instruments=[record])
    return record


def test_passes_run_in_order_on_what_the_one_before_returned() -> None:
    result = run_pipeline(TOY, parse_pipeline("add_copies,add_copies{count=2}"))
    assert [op.type for op in result.root.ops] == ["jax.mul", "fetch"] + ["c_copy"] * 3


def test_no_passes_return_the_program_itself() -> None:
    assert run_pipeline(TOY, ()) is TOY


def test_an_instrument_sees_the_input_and_each_pass() -> None:
    stages: list[Stage] = []
    run_pipeline(TOY, parse_pipeline("nothing,add_copies"), instruments=[stages.append])
    assert [stage.label for stage in stages] == ["00_input", "01_nothing", "02_add_copies"]
    assert [stage.changed for stage in stages] == [False, False, True]
    assert stages[0].pass_ is None
    assert stages[2].before is stages[1].after is TOY
    assert all(stage.seconds >= 0 and stage.verify_seconds >= 0 for stage in stages)


def test_a_stage_knows_what_its_pass_made_and_not_what_others_did() -> None:
    record = run("add_copies{count=3},add_copies{count=2},nothing")
    assert record[1].made == {"c_copy": 3}
    assert record[2].made == {"c_copy": 2}
    assert record[3].made == {}


def test_a_broken_input_is_refused_before_any_pass_runs() -> None:
    broken = TOY.with_block(TOY.root.with_ops([Operator("f", Operands.of("nowhere"))]))
    with pytest.raises(VerifyError, match="'nowhere' is not declared"):
        run_pipeline(broken, parse_pipeline("refuse"))


def test_a_pass_that_breaks_the_program_is_named() -> None:
    with pytest.raises(VerifyError, match="is not declared in block 0") as error:
        run("nothing,add_copies{count=2},forget,nothing")
    note = "  in pass 3 of 4, forget, after nothing, add_copies{count=2}"
    assert error.value.__notes__[-1] == note


def test_instruments_see_the_program_that_a_pass_broke() -> None:
    record = Record()
    with pytest.raises(VerifyError):
        run_pipeline(TOY, parse_pipeline("nothing,forget,nothing"), instruments=[record])
    assert [stage.name for stage in record] == ["input", "nothing", "forget"]


def test_an_error_in_a_pass_names_the_pass_and_those_before_it() -> None:
    with pytest.raises(PassError, match="refuse: 'toy' is refused") as error:
        run("add_copies{count=2},refuse")
    assert error.value.__notes__[-1] == "  in pass 2 of 2, refuse, after add_copies{count=2}"


def test_an_error_in_the_first_pass_says_that_it_was_the_first() -> None:
    with pytest.raises(PassError) as error:
        run("refuse")
    assert error.value.__notes__[-1] == "  in pass 1 of 1, refuse, the first"


def test_more_rules_are_checked_after_every_pass() -> None:
    def few_operators(program: Program) -> Iterator[Finding]:
        if program.op_count > 3:
            yield f"{program.op_count} operators", None

    pipeline = parse_pipeline("add_copies,add_copies")
    with pytest.raises(VerifyError, match="4 operators") as error:
        run_pipeline(TOY, pipeline, rules=[few_operators])
    assert error.value.__notes__[-1] == "  in pass 2 of 2, add_copies, after add_copies"


def test_a_program_that_a_pass_returned_unchanged_is_not_verified_again() -> None:
    seen: list[Program] = []

    def note(program: Program) -> Iterator[Finding]:
        seen.append(program)
        yield from ()

    run_pipeline(TOY, parse_pipeline("nothing,add_copies,nothing"), rules=[note])
    assert len(seen) == 2


def test_a_pass_before_one_that_it_runs_after_is_refused() -> None:
    with pytest.raises(PassError, match="late stands before add_copies, and must run after it"):
        run("nothing,late,add_copies")


@pytest.mark.parametrize("pipeline", ["late", "add_copies,late", "add_copies,late,nothing"])
def test_a_pass_may_follow_what_it_runs_after_or_do_without(pipeline: str) -> None:
    assert run(pipeline)[-1].after.op_count >= 2
