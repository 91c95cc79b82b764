"""What is let go of between the parts of a step."""

from jaxfleet.ir import parse
from jaxfleet.lower.dropping import drops_of

PROGRAM = """
program p
  data  x: f32[4]
  state s: f32[4]
  block 0
    forward
      a: f32[4] = jax.sort(x)
      b: f32[4] = jax.sort(a)
      c: f32[4] = jax.sort(a)
      s = jax.add(b, s)
"""


def test_a_temporary_goes_behind_its_last_reader_and_nothing_else_does() -> None:
    uses = [("x", "a"), ("a", "b"), ("a", "c"), ("b", "s")]
    assert drops_of(parse(PROGRAM), uses, kept=("c",)) == [(), (), ("a",), ("b",)]


def test_what_nobody_reads_goes_at_once() -> None:
    assert drops_of(parse(PROGRAM), [("x", "a"), ("x",)], kept=()) == [("a",), ()]
