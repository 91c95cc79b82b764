"""A program as a function: arguments are checked, and errors have a source line."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.ir import Source, parse
from jaxfleet.lower import ProgramFunction, bind_sizes, cut_axes, device_count, inputs_of

LINEAR = """
program linear {batch=<b>}
  data  x: f32[b,3]
  data  y: f32[2*b]
  param w: f32[3]
  state n: i32[]
  block 0
    forward
      p: f32[b] = jax.dot_general(x, w) {dimension_numbers=[[[1], [0]], [[], []]]}
      total: f32[] = jax.reduce_sum(p) {axes=[0]}
    optimize
      n = jax.add(n, 1:i32)
      fetch(total, p)
"""

STATE = {"w": np.ones(3, np.float32), "n": np.int32(4)}


def data(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, 3), np.float32), "y": np.ones(2 * rows, np.float32)}


def test_a_program_returns_its_state_and_what_is_fetched() -> None:
    run = ProgramFunction(parse(LINEAR), ("total", "p"))
    for rows in (2, 5):
        state, (total, p) = jax.jit(run)(STATE, data(rows))
        assert set(state) == {"w", "n"}
        assert state["n"] == 5
        assert total == 3 * rows
        assert p.shape == (rows,)


def test_an_error_while_lowering_names_the_operator_and_its_line() -> None:
    program = parse("""
    program wrong
      data  x: f32[6]
      block 0
        forward
          y: f32[5] = jax.reshape(x) {dimensions=null, new_sizes=[5], sharding=null}
          fetch(y)
    """)
    reshape, fetch = program.root.ops
    located = replace(reshape, source=Source("model.py", 12, "net"))
    run = ProgramFunction(program.with_blocks([program.root.with_ops([located, fetch])]), ("y",))
    with pytest.raises(ProgramError, match=r"^jax\.reshape: ") as caught:
        jax.jit(run)({}, {"x": np.ones(6, np.float32)})
    notes = "\n".join(caught.value.__notes__)
    assert "model.py:12, in net" in notes
    assert "op: y = jax.reshape(x) {" in notes


def test_what_is_fetched_must_be_made() -> None:
    with pytest.raises(FeedError, match="'q' is fetched, but 'linear' never makes it"):
        ProgramFunction(parse(LINEAR), ("q",))(STATE, data(2))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", np.ones((2, 3), np.int32), r"'x' is fed i32, but it is f32\[b,3\]"),
        ("x", np.ones((2, 4), np.float32), r"'x' is fed an array of shape \[2,4\]"),
        ("x", np.ones(2, np.float32), r"'x' is fed an array of shape \[2\]"),
        ("y", np.ones(5, np.float32), r"'y' is fed an array of shape \[5\].* with b=2"),
    ],
    ids=["dtype", "size", "rank", "two sizes of one letter"],
)
def test_a_value_that_is_not_its_variables_is_refused(
    name: str, value: np.ndarray, message: str
) -> None:
    with pytest.raises(FeedError, match=message):
        ProgramFunction(parse(LINEAR), ())(STATE, {**data(2), name: value})


def test_letters_are_bound_by_the_shapes_of_what_is_fed() -> None:
    variables = parse(LINEAR).variables
    fed = [(variables["x"], (4, 3)), (variables["y"], (8,))]
    assert bind_sizes(fed) == {"b": 4}


def test_inputs_come_in_the_order_of_declaration() -> None:
    state, fed = inputs_of(parse(LINEAR))
    assert [variable.name for variable in state] == ["w", "n"]
    assert [variable.name for variable in fed] == ["x", "y"]


def test_a_rewritten_program_says_what_is_cut() -> None:
    text = LINEAR.replace("{batch=<b>}", '{batch=<b>, devices=4, sharded=[["x", 0], ["p", 0]]}')
    program = parse(text)
    assert device_count(program) == 4
    assert cut_axes(program) == {"x": 0, "p": 0}
    assert device_count(parse(LINEAR)) == 1
    assert cut_axes(parse(LINEAR)) == {}


def test_a_python_number_may_be_fed() -> None:
    text = """
    program scaled
      data  x: f32[]
      block 0
        forward
          y: f32[] = jax.neg(x)
          fetch(y)
    """
    _, (y,) = ProgramFunction(parse(text), ("y",))({}, {"x": 2.0})
    assert y == jnp.float32(-2.0)
