"""Loops that must keep their trip count."""

from jaxfleet.ir import parse
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


def test_a_start_that_a_truth_value_of_the_count_chooses_is_followed() -> None:
    choosing = PROGRAM.replace("n, total", "m: i32[], total").replace(
        "start: i32[] = jax.mul(i, 4:i32)",
        """four: i32[] = jax.mul(i, 4:i32)
      is_later: bool[] = jax.convert_element_type(i) {new_dtype="bool"}
      start: i32[] = jax.select_n(is_later, {first}, four)""",
    )
    fixed = choosing.replace("{first}", "0:i32").replace("  state n: i32[]\n", "")
    other = choosing.replace("{first}", "4:i32").replace("  state n: i32[]\n", "")
    assert "x.slices" in str(ScanSlices().run(parse(fixed)))
    check_pass(ScanSlices(), before=other, after=other)


def test_a_start_that_wraps_is_left_as_it_is() -> None:
    wrapping = PROGRAM.replace("n, total", "m: i32[], total").replace(
        "start: i32[] = jax.mul(i, 4:i32)",
        """small: i8[] = jax.convert_element_type(i) {new_dtype="int8"}
      start: i8[] = jax.mul(small, 64:i8)""",
    )
    wrapping = wrapping.replace("12", "192").replace("[4,3]", "[64,3]").replace("[4, 3]", "[64, 3]")
    wrapping = wrapping.replace("  state n: i32[]\n", "")
    check_pass(ScanSlices(), before=wrapping, after=wrapping)
