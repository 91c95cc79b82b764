"""The test helpers for passes."""

from dataclasses import dataclass, replace

import pytest

from jaxfleet.errors import TextError, VerifyError
from jaxfleet.ir import Program
from jaxfleet.passes import DeadCodeElimination
from jaxfleet.pipeline import Pass
from jaxfleet.testing import check_pass, docstring_programs

HEAD = """
    program p
      data  x: f32[4]
      param w: f32[4]
      block 0
        forward"""
DEAD = f"""{HEAD}
      t: f32[4] = jax.neg(x)
      w = jax.add(w, x)
    """
LIVE = f"""{HEAD}
          w = jax.add(w, x)  # comments and indentation do not matter
"""


@dataclass(frozen=True)
class Forget(Pass):
    """Breaks every program."""

    def run(self, program: Program) -> Program:
        return replace(program, variables={})


def test_a_pass_that_does_what_is_expected_passes() -> None:
    check_pass(DeadCodeElimination(), before=DEAD, after=LIVE)


def test_a_pass_that_does_not_fails_with_a_diff_of_the_two_texts() -> None:
    with pytest.raises(AssertionError) as error:
        check_pass(DeadCodeElimination(), before=DEAD, after=DEAD)
    lines = str(error.value).splitlines()
    assert lines[0] == "dce returned another program:"
    assert lines[1:3] == ["--- expected", "+++ found"]
    assert "-      t: f32[4] = jax.neg(x)" in lines
    assert "       w = jax.add(w, x)" in lines


def test_a_pass_that_breaks_the_program_fails() -> None:
    with pytest.raises(VerifyError, match="is not declared"):
        check_pass(Forget(), before=DEAD, after=DEAD)


@pytest.mark.parametrize("texts", [("program", LIVE), (LIVE, "program")])
def test_a_text_that_does_not_parse_fails(texts: tuple[str, str]) -> None:
    with pytest.raises(TextError):
        check_pass(DeadCodeElimination(), before=texts[0], after=texts[1])


def test_a_docstring_may_show_several_programs() -> None:
    class Documented(Forget):
        """Does something.

        Before::

            program a

        After::

            program b

        And once more.

        Before::

            program c

        After::

            program d

        That is all.
        """

    pairs = [(before.split(), after.split()) for before, after in docstring_programs(Documented)]
    assert pairs == [(["program", "a"], ["program", "b"]), (["program", "c"], ["program", "d"])]


def test_a_docstring_without_programs_has_none() -> None:
    assert docstring_programs(Forget) == []
