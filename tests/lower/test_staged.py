"""Values released between the parts of a step."""

from jaxfleet.ir import parse
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.partition import Segment, segments
from jaxfleet.lower.staged import last_uses

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
    assert last_uses(parse(PROGRAM), uses, kept=("c",)) == [(), (), ("a",), ("b",)]


def test_what_nobody_reads_goes_at_once() -> None:
    assert last_uses(parse(PROGRAM), [("x", "a"), ("x",)], kept=()) == [("a",), ()]


def test_two_values_under_one_name_are_let_go_one_by_one() -> None:
    program = parse("""
    program p
      data  x: f32[4]
      data  go: bool[1]
      block 0
        forward
          a: f32[4] = jax.sort(x)
          sent: f32[4] = jax.sort(x)
          kept: f32[4] = jax.sort(x)
          cut()
          b: f32[4] = jax.sort(a)
          send(sent)
          c: f32[4] = jax.sort(b)
          Out=kept = conditional_block(Cond=go, Input=[kept, c]) {sub_block=^1}
          cut()
          a = jax.sort(c)
          sent = jax.sort(c)
          kept = jax.sort(kept)
          cut()
          d: f32[4] = jax.add(a, kept)
          fetch(d)
      block 1 in 0
        forward
          kept = jax.sort(c)
    """)
    declared, items = segments(program, {}, cache=ExecutableCache())
    parts = [item for item in items if isinstance(item, Segment)]
    # Values for a server, and values that a branch may leave unchanged, have one name each.
    assert [set(part.writes) for part in parts] == [
        *({"a~1", "sent", "kept"}, {"b"}, {"c", "kept"}, {"a", "sent", "kept"}, {"d"})
    ]
    uses = [(*part.reads, *part.writes) for part in parts]
    assert [set(names) for names in last_uses(declared, uses, kept=("d",))] == [
        *(set(), {"a~1"}, {"b"}, {"c", "sent"}, {"a", "kept"})
    ]
