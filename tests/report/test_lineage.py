"""Lines of a program through its passes."""

from hypothesis import given

from jaxfleet.ir import Program, parse, print_operator
from jaxfleet.pipeline import Record
from jaxfleet.report import History, StageRecord, build_report, of_program, of_record
from jaxfleet.testing.programs import programs, valid_programs
from tests.report.decoding import data_of, orders, texts
from tests.report.drawn import deep_history, server_histories


def printed(program: Program) -> list[str]:
    return [print_operator(op) for block in program.blocks for op in block.ops]


def test_every_stage_is_its_program() -> None:
    history = deep_history(4, servers=2)
    data = data_of(build_report([history]))
    assert texts(data) == [printed(stage.program) for stage in history.stages]


@given(programs())
def test_any_program_is_reported(program: Program) -> None:
    data = data_of(build_report([of_program(program)]))
    assert texts(data) == [printed(program)]


@given(valid_programs(), valid_programs())
def test_any_change_of_a_program_is_reported(before: Program, after: Program) -> None:
    stages = (StageRecord("input", before), StageRecord("other", after))
    data = data_of(build_report([History("drawn", stages)]))
    last = list(texts(data))
    assert last[-1] == printed(after)


BEFORE = """
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      a: f32[4] = jax.neg(x)
      b: f32[4] = jax.exp(a)
      c: f32[4] = jax.add(b, x) {axis=0}
      w = jax.add(w, c)
"""


def counts(after: str) -> list[int]:
    stages = (StageRecord("input", parse(BEFORE)), StageRecord("change", parse(after)))
    data = data_of(build_report([History("p", stages)]))
    found: list[int] = data["programs"][0]["stages"][1]["counts"]
    return found


def test_what_a_pass_did_is_counted() -> None:
    added = BEFORE.replace("      b:", "      n: f32[4] = jax.neg(a)\n      b:")
    assert counts(added) == [1, 0, 0, 0, 0, 5]
    removed = BEFORE.replace("      a: f32[4] = jax.neg(x)\n", "").replace("exp(a)", "exp(x)")
    assert counts(removed) == [0, 1, 1, 0, 0, 3]
    assert counts(BEFORE.replace("axis=0", "axis=1")) == [0, 0, 1, 0, 0, 4]


def test_an_operator_that_only_gets_another_type_is_counted_apart() -> None:
    assert counts(BEFORE.replace("a: f32[4]", "a: bf16[4]")) == [0, 0, 0, 2, 0, 4]


def test_a_moved_operator_is_counted_as_moved() -> None:
    a = "      a: f32[4] = jax.neg(x)\n"
    between = "      n: f32[4] = jax.neg(x)\n      m: f32[4] = jax.exp(x)\n"
    before, after = BEFORE.replace(a, a + between), BEFORE.replace(a, between + a)
    stages = (StageRecord("input", parse(before)), StageRecord("change", parse(after)))
    program = data_of(build_report([History("p", stages)]))["programs"][0]
    assert program["stages"][1]["counts"] == [0, 0, 0, 0, 1, 6]
    (moved,) = program["stages"][1]["moved"]
    assert moved in list(orders(program))[1]


def test_servers_are_shown_without_the_program_they_were_written_from() -> None:
    first, *_ = server_histories(2, 2)
    data = data_of(build_report([first]))
    assert texts(data) == [printed(first.last)]


def test_an_unchanged_stage_takes_one_edit() -> None:
    record = Record()
    assert of_record(record) == ()
    history = deep_history(2)
    program = history.stages[0].program
    same = (StageRecord("input", program), StageRecord("nothing", program))
    data = data_of(build_report([History("p", same)]))
    assert len(data["programs"][0]["stages"][1]["order"]) == 1
