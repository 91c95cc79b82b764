"""Memory of a step at each operator: lifetimes, sub-blocks, and in-place updates."""

from jaxfleet.analysis.memory import memory_profile
from jaxfleet.ir import Program, parse

STEP = """
program p
  data  x: f32[b,4]
  param w: f32[4]
  block 0
    forward
      h: f32[b,4] = jax.mul(x, w)
      y: f32[b] = jax.reduce_sum(h) {axes=[1]}
      z: f32[b,4] = jax.neg(h)
      loss: f32[] = jax.reduce_sum(z) {axes=[0, 1]}
    backward
      w@GRAD: f32[4] = jax.reduce_sum(z) {axes=[0]}
    optimize
      w = jax.sub(w, w@GRAD)
      fetch(loss)
"""


def forward(ops: str) -> Program:
    """Returns a program of these operators on `x`, all of forward."""
    head = "program p\n  data  x: f32[16]\n  block 0\n    forward\n"
    return parse(head + ops)


def test_values_count_from_where_they_are_made_to_their_last_reader() -> None:
    # b is 8: h and z are 128 bytes, y is 32 and unused; the loss is returned.
    assert memory_profile(parse(STEP), {"b": 8}, merges=False).bytes == (
        128,
        160,
        256,
        128,
        144,
        16,
        0,
    )


def test_what_is_fetched_by_name_is_returned() -> None:
    assert memory_profile(parse(STEP), {"b": 8}, keep=["z"], merges=False).bytes == (
        128,
        160,
        128,
        0,
        16,
        16,
        0,
    )


def test_the_peak_names_what_is_alive() -> None:
    curve = memory_profile(parse(STEP), {"b": 8}, merges=False)
    assert [value.name for value in curve.alive(curve.peak_at)] == ["h", "z"]
    assert curve.text() == (
        "peak 256 B at operator 2 of 7, jax.neg (forward)\n"
        "      128 B  h: f32[b,4]\n"
        "      128 B  z: f32[b,4]"
    )
    assert curve.text(most=1).endswith("      128 B  1 more values")


def test_a_variable_that_its_reader_writes_again_has_one_buffer() -> None:
    program = forward("""
          h: f32[16] = jax.neg(x)
          h = jax.tanh(h)
          y: f32[16] = jax.neg(h)
    """)
    assert memory_profile(program, {}, merges=False).bytes == (64, 64, 128)


def test_a_variable_written_anew_is_another_value() -> None:
    program = forward("""
          h: f32[16] = jax.neg(x)
          y: f32[4] = jax.reduce_sum(h) {axes=[0]}
          z: f32[4] = jax.neg(y)
          h = jax.tanh(x)
          h2: f32[16] = jax.neg(h)
    """)
    assert memory_profile(program, {}, merges=False).bytes == (64, 80, 32, 64, 128)


def test_a_sub_block_counts_where_its_operator_stands() -> None:
    program = parse("""
    program p
      data  x: f32[16]
      data  go: bool[1]
      block 0
        forward
          h: f32[16] = jax.neg(x)
          y: f32[16] = jax.neg(x)
          conditional_block(Cond=go) {sub_block=^1}
          z: f32[16] = jax.neg(y)
      block 1 in 0
        forward
          a: f32[32] = jax.concatenate(h, h) {dimension=0}
          y = jax.slice(a) {start=0}
    """)
    # Block 1 reads h and may write y, or not: both live until it has run.
    assert memory_profile(program, {}, merges=False).bytes == (64, 128, 128 + 128, 128)


def test_what_a_loop_holds_inside_counts_while_it_runs() -> None:
    program = forward("""
          h: f32[16] = jax.neg(x)
          y: f32[16] = jax.scan(h) {body=^1, length=3, num_carry=1, num_consts=0}
          z: f32[16] = jax.neg(y)
      block 1 in 0 (a: f32[16]) -> (d)
        forward
          c: f32[16] = jax.tanh(a)
          b: f32[32] = jax.concatenate(c, c) {dimension=0}
          d: f32[16] = jax.slice(b) {limit_indices=[16], start_indices=[0], strides=none}
    """)
    assert memory_profile(program, {}, merges=False).bytes == (64, 128 + 64 + 128, 128)


def test_an_executable_holds_what_it_is_given_and_what_it_makes_throughout() -> None:
    program = forward("""
          a: f32[16] = jax.cumsum(x) {axis=0, reverse=false}
          b: f32[16] = jax.cumsum(a) {axis=0, reverse=false}
          c: f32[16] = jax.cumsum(b) {axis=0, reverse=false}
          cut()
          d: f32[16] = jax.cumsum(c) {axis=0, reverse=false}
          e: f32[16] = jax.cumsum(d) {axis=0, reverse=false}
    """)
    # c lives from the first operator to the last; in one executable it would not.
    assert memory_profile(program, {}).bytes == (128, 192, 128, 64, 128, 192)


def test_a_merged_operator_takes_no_bytes_unless_a_cut_comes_before_its_reader() -> None:
    step = """
    program p
      data  x: f32[16]
      block 0
        forward
          a: f32[16] = jax.cumsum(x) {{axis=0, reverse=false}}
          b: f32[16] = jax.neg(a)
          {cut}
          c: f32[16] = jax.abs(b)
          d: f32[16] = jax.cumsum(c) {{axis=0, reverse=false}}
    """
    whole = memory_profile(parse(step.format(cut="")), {})
    assert [value.name for value in whole.values if value.bytes] == ["a", "c", "d"]
    cut = memory_profile(parse(step.format(cut="cut()")), {})
    assert [value.name for value in cut.values if value.bytes] == ["a", "b", "c", "d"]
