"""Buffers that an update may reuse."""

from jaxfleet.ir import parse
from jaxfleet.passes import Donate
from jaxfleet.testing import check_pass

HEAD = """
  data  x: f32[4]
  state m: f32[4]
  param w: f32[4]
  param frozen: f32[4]
  block 0
    optimize"""


def check(ops: str, donated: str) -> None:
    """Checks the donations of a program with these operators."""
    before = f"program p{HEAD}\n{ops}"
    after = f"program p {donated}{HEAD}\n{ops}"
    check_pass(Donate(), before=before, after=after)


def test_what_is_written_is_donated_in_order_of_declaration() -> None:
    check("w = jax.add(w, x)\n m = jax.add(m, frozen)", '{donate=["m", "w"]}')


def test_where_nothing_is_written_nothing_is_donated() -> None:
    check("fetch(w)", "")


def test_a_write_in_a_sub_block_counts() -> None:
    check("jax.cond(x) {block=^1}\n block 1\n optimize\n w = jax.add(w, x)", '{donate=["w"]}')


def test_an_argument_of_a_function_is_no_parameter() -> None:
    ops = """
      m = jax.scan(w) {body=^1}
    block 1 (a: f32[4]) -> (b)
    forward
      b: f32[4] = jax.neg(a)
    """
    check(ops, '{donate=["m"]}')


def test_a_former_answer_is_replaced() -> None:
    before = f'program p {{donate=["frozen"], role="trainer"}}{HEAD}\n w = jax.add(w, x)'
    after = f'program p {{donate=["w"], role="trainer"}}{HEAD}\n w = jax.add(w, x)'
    check_pass(Donate(), before=before, after=after)


def test_a_former_answer_that_no_longer_holds_goes() -> None:
    before = f'program p {{donate=["w"]}}{HEAD}\n fetch(w)'
    check_pass(Donate(), before=before, after=f"program p{HEAD}\n fetch(w)")


def test_a_program_with_the_right_answer_is_returned_itself() -> None:
    program = Donate().run(parse(f"program p{HEAD}\n w = jax.add(w, x)"))
    assert Donate().run(program) is program
