"""Loops that must keep their count."""

from jaxfleet.passes import ScanSlices
from jaxfleet.testing import check_pass

PROGRAM = """program p {batch=12}
  data  x: f32[12,3]
  state n: i32[]
  block 0
    forward
      n, total: f32[] = jax.scan(x, 0:i32, 0.0:f32) {body=^1, length=3, num_carry=2, num_consts=1, reverse=false, unroll=1}
      fetch(total)
  block 1 (a: f32[12,3], i: i32[], c: f32[]) -> (j, d)
    forward
      j: i32[] = jax.add(i, 1:i32)
      start: i32[] = jax.mul(i, 4:i32)
      s: f32[4,3] = jax.dynamic_slice(a, start, 0:i32) {slice_sizes=[4, 3]}
      z: f32[] = jax.reduce_sum(s) {axes=[0, 1]}
      d: f32[] = jax.add(c, z)
"""  # noqa: E501  # an operator stands on one line


def test_a_count_that_the_loop_writes_to_the_state_is_kept() -> None:
    check_pass(ScanSlices(), before=PROGRAM, after=PROGRAM)
