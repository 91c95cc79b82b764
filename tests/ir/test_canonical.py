"""Programs that are equal except for the names of temporaries."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.ir import Program, canonical, equivalent, parse, print_program, verify
from jaxfleet.testing.programs import valid_programs
from tests.drawing import at_most

PROGRAM = """
program p
  data  x: f32[]
  param w: f32[]
  block 0
    forward
      h: f32[] = mul(x, w)
      g: f32[] = run(h) {body=^1} for (w, g)
    optimize
      w = sgd(w, g)
  block 1 (i: f32[]) -> (j)
    forward
      j: f32[] = add(i, h)
"""


@at_most(300)
@given(valid_programs(), st.integers(1, 100))
def test_a_program_is_equivalent_to_itself_with_other_names(program: Program, more: int) -> None:
    text = print_program(program, source=True)
    other = re.sub(r"temp(\d+)", lambda name: f"t{int(name[1]) * 7 + more}", text)
    assert equivalent(program, parse(other))
    assert parse(other) == program or "temp" in text


@at_most(200)
@given(valid_programs())
def test_a_canonical_program_is_valid_and_stays_as_it_is(program: Program) -> None:
    named = canonical(program)
    verify(named)
    assert canonical(named) == named
    assert named.variables == program.variables


def test_temporaries_are_named_as_they_come_up_in_all_blocks() -> None:
    text = print_program(canonical(parse(PROGRAM)))
    assert text.strip() == re.sub(
        r"\b[hgij]\b", lambda name: f'"%{"hgij".index(name[0])}"', PROGRAM.strip()
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mul(x, w)", "mul(w, x)"),
        ("add(i, h)", "add(h, i)"),
        ("h: f32[]", "h: f32[2]"),
        ("sgd(w, g)", "sgd(w, h)"),
        ("data  x", "data  y"),
        ("-> (j)", "-> (i)"),
        ("program p", "program q"),
    ],
)
def test_any_other_difference_counts(old: str, new: str) -> None:
    changed = PROGRAM.replace(old, new)
    assert not equivalent(parse(PROGRAM), parse(changed))


def test_temporaries_that_nothing_mentions_are_known_by_their_types() -> None:
    def program(*declared: str) -> Program:
        lines = [f"temp {name}: {type_}" for name, type_ in map(str.split, declared)]
        return parse("program p\n  block 0\n" + "\n".join(lines))

    assert equivalent(program("a f32[2]", "b i32[]"), program("c i32[]", "d f32[2]"))
    assert not equivalent(program("a f32[2]", "b i32[]"), program("c i32[]", "d i32[]"))
