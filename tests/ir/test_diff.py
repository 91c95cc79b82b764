"""Differences of two programs, by their parts and by their text."""

import difflib
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.ir import (
    Attrs,
    Block,
    Literal,
    Operands,
    Operator,
    Program,
    Source,
    Variable,
    diff,
    parse,
    print_program,
    unified_diff,
)
from jaxfleet.testing.programs import programs, valid_programs
from tests.drawing import at_most
from tests.ir.timing import seconds

BEFORE = """
program p
  data  x: f32[b,4]
  param w: f32[4,4]
  block 0
    forward
      h: f32[b,4] = dot(x, w)
      g: f32[b,4] = relu(h)
      loss: f32[] = sum(g)
    backward
      w@GRAD: f32[4,4] = grad(x, h, loss)
    optimize
      w = sgd(w, w@GRAD)
"""

AFTER = """
program p.trainer {role="trainer"}
  data  x: f32[b,4]
  param w: f32[4,4]
  state step: i32[]
  block 0
    forward
      h: f32[b,4] = dot(x, w)
      g: f32[b,4] = gelu(h)
      loss: f32[] = sum(g)
    backward
      w@GRAD: f32[4,4] = grad(x, h, loss)
    dist
      w@GRAD.sum: f32[4,4] = c_allreduce_sum(w@GRAD)
    optimize
      w = sgd(w, w@GRAD.sum)
      step = count(step) {body=^1}
  block 1 (i: i32[]) -> (i)
"""

DIFFERENCE = """
program p -> program p.trainer
  ~ {} -> {role="trainer"}
  + state step: i32[]
block 0: 2 added, 2 changed
  ~ g = relu(h) -> g = gelu(h)
  + w@GRAD.sum: f32[4,4] = c_allreduce_sum(w@GRAD)
  ~ w = sgd(w, w@GRAD) -> w = sgd(w, w@GRAD.sum)
  + step = count(step) {body=^1}
block 1 (i: i32[]) -> (i): added, 0 operators
""".strip()


def test_the_text_of_a_difference_says_what_a_pass_did() -> None:
    assert str(diff(parse(BEFORE), parse(AFTER))) == DIFFERENCE


def test_changes_can_be_asked_for_by_kind() -> None:
    found = diff(parse(BEFORE), parse(AFTER))
    assert [c.after.type for c in found.operators("added") if c.after] == [
        "c_allreduce_sum",
        "count",
    ]
    assert [(c.at_before, c.at_after) for c in found.operators("changed")] == [(1, 1), (4, 5)]
    assert not found.operators("removed")
    assert not found.operators("moved")


@at_most(300)
@given(valid_programs(max_ops=4), valid_programs(max_ops=4))
def test_a_difference_is_empty_exactly_where_programs_are_equal(a: Program, b: Program) -> None:
    assert diff(a, b).is_empty == (a == b)
    assert diff(a, parse(print_program(a))).is_empty
    assert str(diff(a, b))


@at_most(100)
@given(programs(max_ops=2), programs(max_ops=2))
def test_any_two_programs_can_be_compared(a: Program, b: Program) -> None:
    assert diff(a, a).is_empty
    assert diff(a, b).is_empty == (a == b)


@at_most(200)
@given(valid_programs(), st.randoms())
def test_an_operator_that_went_is_the_only_one_removed(
    program: Program, chance: random.Random
) -> None:
    ops = program.root.ops
    if len(set(ops)) < len(ops) or not ops:
        return
    gone = chance.randrange(len(ops))
    less = program.with_block(program.root.with_ops(ops[:gone] + ops[gone + 1 :]))
    (change,) = diff(program, less).operators("removed")
    assert (change.before, change.at_before) == (ops[gone], gone)
    (change,) = diff(less, program).operators("added")
    assert (change.after, change.at_after) == (ops[gone], gone)


def test_an_operator_that_stands_elsewhere_has_moved() -> None:
    program = parse(BEFORE)
    h, g, loss, *rest = program.root.ops
    other = program.with_block(program.root.with_ops([g, loss, h, *rest]))
    (change,) = diff(program, other).operators("moved")
    assert (change.before, change.at_before, change.at_after) == (h, 0, 2)
    assert "  > h = dot(x, w) (from 0 to 2)" in str(diff(program, other))


def test_a_block_keeps_its_counterpart_when_those_before_it_go() -> None:
    def program(*bodies: str) -> Program:
        lines = ["program p", "  data x: f32[]", "  block 0", "    forward"]
        lines += [f"      run_{body}(x) {{body=^{i}}}" for i, body in enumerate(bodies, 1)]
        for i, body in enumerate(bodies, 1):
            lines += [f"  block {i}", "    forward", f"      {body}(x)"]
        return parse("\n".join(lines))

    found = diff(program("a", "b", "c"), program("b", "c"))
    assert str(found) == (
        "program p\n"
        "  block 2 is now block 1\n"
        "  block 3 is now block 2\n"
        "block 0: 1 removed\n"
        "  - run_a(x) {body=^1}\n"
        "block 1: removed, 1 operators\n"
        "  - a(x)"
    )


def test_a_variable_that_changed_shows_both_its_declarations() -> None:
    other = parse(BEFORE.replace("param w: f32[4,4]", "state w: f32[4,8]"))
    assert str(diff(parse(BEFORE), other)).splitlines() == [
        "program p",
        "  ~ param w: f32[4,4] -> state w: f32[4,8]",
    ]


def test_source_lines_are_no_difference() -> None:
    program = parse(BEFORE)
    moved = [replace(op, source=Source("a.py", 3)) for op in program.root.ops]
    other = program.with_block(program.root.with_ops(moved))
    assert str(diff(program, other)) == "program p\n  no difference"
    assert unified_diff(program, other) == ""
    assert "+      h: f32[b,4] = dot(x, w)  # a.py:3" in unified_diff(program, other, source=True)


def test_a_long_difference_is_cut_short() -> None:
    empty = parse("program p\n  data x: f32[]\n  block 0")
    full = empty.with_block(empty.root.with_ops([Operator("f", Operands.of("x"))] * 9))
    assert diff(empty, full).text(max_lines=2).splitlines() == [
        "program p",
        "block 0: 9 added",
        "  + f(x)",
        "  + f(x)",
        "  ... and 7 more",
    ]


def test_the_unified_diff_of_two_texts() -> None:
    assert unified_diff(parse(BEFORE), parse(AFTER), context=1) == (
        "--- p\n"
        "+++ p.trainer\n"
        "@@ -1,4 +1,5 @@\n"
        "-program p\n"
        '+program p.trainer {role="trainer"}\n'
        "   data  x: f32[b,4]\n"
        "   param w: f32[4,4]\n"
        "+  state step: i32[]\n"
        "   block 0\n"
        "@@ -6,3 +7,3 @@\n"
        "       h: f32[b,4] = dot(x, w)\n"
        "-      g: f32[b,4] = relu(h)\n"
        "+      g: f32[b,4] = gelu(h)\n"
        "       loss: f32[] = sum(g)\n"
        "@@ -10,3 +11,7 @@\n"
        "       w@GRAD: f32[4,4] = grad(x, h, loss)\n"
        "+    dist\n"
        "+      w@GRAD.sum: f32[4,4] = c_allreduce_sum(w@GRAD)\n"
        "     optimize\n"
        "-      w = sgd(w, w@GRAD)\n"
        "+      w = sgd(w, w@GRAD.sum)\n"
        "+      step = count(step) {body=^1}\n"
        "+  block 1 (i: i32[]) -> (i)"
    )


@at_most(200)
@given(valid_programs(max_ops=4), valid_programs(max_ops=4), st.integers(0, 4))
def test_a_unified_diff_leads_from_one_text_to_the_other(
    a: Program, b: Program, context: int
) -> None:
    old, new = (print_program(program).split("\n") for program in (a, b))
    assert _patched(old, unified_diff(a, b, context=context).split("\n")) == new


def test_a_unified_diff_has_the_form_that_pythons_has() -> None:
    old, new = (print_program(parse(text)).split("\n") for text in (BEFORE, AFTER))
    expected = difflib.unified_diff(old, new, "p", "p.trainer", lineterm="")
    assert unified_diff(parse(BEFORE), parse(AFTER)).split("\n") == list(expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("compare", [diff, unified_diff])
def test_ten_thousand_operators_are_compared_in_a_moment(compare: object) -> None:
    assert callable(compare)
    names = [f"t{index}" for index in range(10_000)]
    ops = [
        Operator(
            "add", Operands.of("x", Literal("1", "i32")), Operands.of(name), Attrs({"axis": 0})
        )
        for name in names
    ]
    variables = {name: Variable(name, "f32", (4,)) for name in names}
    before = Program(blocks=(Block(variables=variables, ops=tuple(ops)),))
    chance = random.Random(0)
    kept = [op for op in ops if chance.random() < 0.95]
    for _ in range(100):
        kept.insert(chance.randrange(len(kept)), kept.pop(chance.randrange(len(kept))))
    after = before.with_block(before.root.with_ops(kept))
    # 0.1 on the development machine
    assert seconds(lambda: compare(before, after)) < 1.0


def _patched(lines: list[str], patch: list[str]) -> list[str]:
    """Applies a unified diff."""
    result: list[str] = []
    at = 0
    for line in patch[2:]:
        if line.startswith("@@"):
            first, _, count = line.split()[1][1:].partition(",")
            start = int(first) - (count != "0")
            result += lines[at:start]
            at = start
        elif line.startswith("+"):
            result.append(line[1:])
        else:
            assert lines[at] == line[1:]
            result += [line[1:]] if line.startswith(" ") else []
            at += 1
    return result + lines[at:]
