"""cut_apart: its cuts and rejections; the docstring shows the plain case."""

import pytest
from hypothesis import given

from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import CutApart
from tests.passes.drawn import programs

PROGRAM = """
program p
  data  x: f32[100]
  state s: f32[]
  block 0
    forward
      a: f32[100] = jax.sort(x)
      b: f32[] = jax.dot(a, a)
      s = jax.add(s, b)
"""


def test_given_cuts_stand_before_their_operators() -> None:
    made = CutApart(cuts=(1, 2)).run(parse(PROGRAM))
    verify(made)
    assert [op.type for op in made.root.ops] == ["jax.sort", "cut", "jax.dot", "cut", "jax.add"]


def test_what_is_cut_already_is_refused() -> None:
    with pytest.raises(PassError, match="cut already"):
        CutApart().run(CutApart(cuts=(1,)).run(parse(PROGRAM)))


@pytest.mark.parametrize("cuts", [(2, 1), (1, 1)])
def test_cuts_that_are_not_in_order_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(PassError, match="not in order"):
        CutApart(cuts=cuts).run(parse(PROGRAM))


@pytest.mark.parametrize("cut", [0, 3, -1])
def test_cuts_outside_the_program_are_refused(cut: int) -> None:
    with pytest.raises(PassError, match="no operator"):
        CutApart(cuts=(cut,)).run(parse(PROGRAM))


@given(programs())
def test_only_cuts_are_added(program: Program) -> None:
    made = CutApart().run(program)
    verify(made)
    ops = [op for op in made.root.ops if op.type != "cut"]
    assert made.with_block(made.root.with_ops(ops)) == program
