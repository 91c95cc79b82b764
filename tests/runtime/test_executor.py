"""Executor and Scope: any program, by name."""

import jax
import numpy as np
import pytest

from jaxfleet import Executor, Scope
from jaxfleet.errors import FeedError
from jaxfleet.ir import Program, parse
from jaxfleet.passes import Donate, GradAllreduce

LINEAR = """
program linear {batch=<b>}
  data  x: f32[b,3]
  param w: f32[3]
  block 0
    forward
      y: f32[b] = jax.dot_general(x, w) {dimension_numbers=[[[1], [0]], [[], []]]}
      total: f32[] = jax.reduce_sum(y) {axes=[0]}
    backward
      one: f32[b] = jax.broadcast_in_dim(1.0:f32) {broadcast_dimensions=[], shape=[<b>]}
      w@GRAD: f32[3] = jax.dot_general(one, x) {dimension_numbers=[[[0], [0]], [[], []]]} for (w, w@GRAD)
    optimize
      step: f32[3] = jax.mul(0.5:f32, w@GRAD)
      w = jax.sub(w, step)
      fetch(total, y)
"""  # noqa: E501  # an operator stands on one line

STARTUP = """
program startup
  param w: f32[3]
  block 0
    forward
      w = jax.broadcast_in_dim(2.0:f32) {broadcast_dimensions=[], shape=[3]}
"""


def linear() -> Program:
    """Returns a program that takes one step on a sum."""
    return parse(LINEAR)


def rows(count: int) -> np.ndarray:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


def test_a_run_reads_and_writes_the_scope() -> None:
    executor = Executor()
    executor.run(parse(STARTUP))
    (total,) = executor.run(linear(), feed={"x": rows(4)}, fetch=["total"])
    assert total == 2 * rows(4).sum()
    np.testing.assert_array_equal(executor.scope["w"], 2 - 0.5 * rows(4).sum(axis=0))


def test_one_program_serves_every_batch_size() -> None:
    executor, program = Executor(), linear()
    executor.run(parse(STARTUP))
    for count in (1, 5, 2):
        (y,) = executor.run(program, feed={"x": rows(count)}, fetch=["y"])
        assert y.shape == (count,)


def test_a_program_for_devices_gives_what_one_device_gives() -> None:
    one, four = Executor(), Executor()
    program = GradAllreduce(devices=4).run(linear())
    for executor in (one, four):
        executor.run(parse(STARTUP))
    wanted = one.run(linear(), feed={"x": rows(8)}, fetch=["total", "y", "w@GRAD", "w"])
    found = four.run(program, feed={"x": rows(8)}, fetch=["total", "y", "w@GRAD", "w"])
    for left, right in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(left, right)


def test_donated_state_is_reused() -> None:
    executor = Executor()
    executor.run(parse(STARTUP))
    before = executor.scope["w"]
    executor.run(Donate().run(linear()), feed={"x": rows(2)})
    assert before.is_deleted()
    assert not executor.scope["w"].is_deleted()


def test_an_inner_scope_sees_the_outer_and_writes_its_own() -> None:
    outer = Scope()
    outer["w"] = jax.numpy.full(3, 2.0)
    inner = outer.new_scope()
    Executor(inner).run(linear(), feed={"x": rows(2)})
    np.testing.assert_array_equal(outer["w"], [2, 2, 2])
    assert not np.array_equal(inner["w"], outer["w"])


@pytest.mark.parametrize(
    ("feed", "fetch", "message"),
    [
        ({}, [], "'x' (f32[b,3]) is not fed"),
        ({"x": rows(2), "z": rows(2)}, [], "'z' is fed, but program 'linear' has no such data"),
        ({"x": rows(2)}, ["loss"], "'loss' is fetched, but program 'linear' has no such variable"),
        ({"x": np.zeros((2, 4), np.float32)}, [], "'x' is fed an array of shape [2,4]"),
        ({"x": np.zeros((2, 3), np.int32)}, [], "'x' is fed i32, but it is f32[b,3]"),
    ],
)
def test_what_does_not_fit_the_program_is_refused(
    feed: dict[str, np.ndarray], fetch: list[str], message: str
) -> None:
    executor = Executor()
    executor.run(parse(STARTUP))
    with pytest.raises(FeedError) as caught:
        executor.run(linear(), feed=feed, fetch=fetch)
    assert message in str(caught.value)


def test_a_device_s_own_part_of_a_value_is_not_fetched() -> None:
    executor = Executor()
    executor.run(parse(STARTUP))
    program = GradAllreduce(devices=2).run(linear())
    with pytest.raises(FeedError, match="'step' is fetched, but each device has only its part"):
        executor.run(program, feed={"x": rows(4)}, fetch=["step"])


def test_state_that_is_not_in_the_scope_is_named() -> None:
    with pytest.raises(FeedError, match=r"'w' \(f32\[3\]\) is not in the scope"):
        Executor().run(linear(), feed={"x": rows(2)})
