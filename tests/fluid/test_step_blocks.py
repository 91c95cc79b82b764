"""`StaticRNN` and `DynamicRNN`: values and gradients, against programs without blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.ir import parse
from tests.fluid.nets import fresh
from tests.fluid.unrolled import Array, gradients, same

RANDOM = np.random.default_rng(0)


def drawn(*shape: int) -> Array:
    return RANDOM.normal(size=shape).astype("f4")


X = drawn(5, 2, 3)  # steps, batch, width
H0 = drawn(2, 4)
W = {"w_x": drawn(3, 4), "w_h": drawn(4, 4) / 2, "b": drawn(4)}
LENGTHS = [3, 1, 5, 0]
ROWS = drawn(9, 3)


def cell(x: fluid.Variable, h: fluid.Variable) -> fluid.Variable:
    return layers.fc([x, h], 4, act="tanh", param_attr=["w_x", "w_h"], bias_attr="b")


def time_major() -> tuple[fluid.Variable, fluid.Variable]:
    x = fluid.data("x", [5, None, 3])
    h = fluid.data("h", [None, 4])
    h.sizes = (x.sizes[1], 4) if x.sizes else None
    x.stop_gradient = h.stop_gradient = False
    return x, h


def stepped() -> fluid.Variable:
    x, h = time_major()
    rnn = layers.StaticRNN()
    with rnn.step():
        word = rnn.step_input(x)
        begun, zero = rnn.memory(init=h), rnn.memory(shape=[-1, 4], batch_ref=word)
        hidden = cell(word, begun)
        total = layers.elementwise_add(zero, hidden)
        rnn.update_memory(begun, hidden)
        rnn.update_memory(zero, total)
        rnn.output(hidden, total)
    hidden, total = rnn()
    return layers.mean(layers.square(hidden) + layers.tanh(total))


def by_hand() -> fluid.Variable:
    x, h = time_major()
    total, kept = None, []
    for at in range(5):
        h = cell(layers.squeeze(layers.slice(x, [0], [at], [at + 1]), [0]), h)
        total = h if total is None else total + h
        kept.append(layers.square(h) + layers.tanh(total))
    return layers.mean(layers.stack(kept))


def test_a_static_rnn_is_a_loop_with_its_gradients() -> None:
    feed = {"x": X, "h": H0}
    same(gradients(stepped, feed, W, ["x", "h"]), gradients(by_hand, feed, W, ["x", "h"]))


def rows() -> tuple[fluid.Variable, fluid.Variable]:
    x = layers.data("x", [3], lod_level=1, stop_gradient=False)
    return x, layers.data("h", [4], stop_gradient=False)


def dynamic() -> fluid.Variable:
    """Returns a loss of all rows' hidden states and of the last ones."""
    x, h = rows()
    rnn = layers.DynamicRNN()
    with rnn.block():
        word = rnn.step_input(x)
        begun, zero = rnn.memory(init=h), rnn.memory(shape=[4], value=1.0)
        hidden = cell(word, begun)
        total = zero * hidden + rnn.static_input(h)
        rnn.update_memory(begun, hidden)
        rnn.update_memory(zero, total)
        rnn.output(hidden, total)
    hidden, total = rnn()
    pooled = layers.sequence_pool(hidden, "sum") + layers.sequence_last_step(total)
    return layers.mean(layers.square(pooled))


def each_sequence() -> fluid.Variable:
    """Returns the same loss of dense rows, with each sequence cut out by indices."""
    x = fluid.data("rows", [9, 3])
    h = fluid.data("h", [4, 4])
    x.stop_gradient = h.stop_gradient = False
    starts, pooled = np.cumsum([0, *LENGTHS]), []
    for number, length in enumerate(LENGTHS):
        hidden = first = layers.slice(h, [0], [number], [number + 1])
        total, summed = (layers.fill_constant([1, 4], "float32", value) for value in (1, 0))
        for at in range(starts[number], starts[number] + length):
            hidden = cell(layers.slice(x, [0], [at], [at + 1]), hidden)
            total = total * hidden + first
            summed = summed + hidden
        last = total if length else layers.fill_constant([1, 4], "float32", 0)
        pooled.append(summed + last)
    return layers.mean(layers.square(layers.concat(pooled)))


@pytest.mark.grid
def test_a_dynamic_rnn_is_a_loop_over_each_sequence_with_its_gradients() -> None:
    lod = fluid.create_lod_tensor(ROWS, [LENGTHS], fluid.CPUPlace())
    h = drawn(4, 4)
    made = gradients(dynamic, {"x": lod, "h": h}, W, ["h"])
    wanted = gradients(each_sequence, {"rows": ROWS, "h": h}, W, ["h"])
    same(made, wanted)


@pytest.mark.parametrize("build", [stepped, dynamic])
def test_a_program_of_steps_prints_and_parses(build: Callable[[], fluid.Variable]) -> None:
    with fresh() as (main, _):
        fluid.optimizer.SGD(0.1).minimize(build())
    made = ir_program(main)
    assert parse(str(made)) == made
    again = fluid.Program.parse_from_string(main.serialize_to_string())
    assert str(ir_program(again)) == str(made)


def test_each_step_drops_out_others_and_backward_the_same() -> None:
    """Where a step's mask is 0, so is the gradient of its input; elsewhere it is twice that."""
    with fresh() as (main, _):
        x = fluid.data("x", [6, 2, 3])
        x.stop_gradient = False
        rnn = layers.StaticRNN()
        with rnn.step():
            word = rnn.step_input(x)
            rnn.step_output(layers.dropout(word, 0.5, dropout_implementation="upscale_in_train"))
        out = rnn()
        (grad,) = fluid.gradients([layers.reduce_sum(out)], [x])
        found = fluid.Executor().run(main, {"x": np.ones((6, 2, 3), "f4")}, [out, grad])
    np.testing.assert_array_equal(found[0], found[1])
    assert len({step.tobytes() for step in found[0]}) > 1


def test_a_memory_that_nothing_updates_is_refused() -> None:
    def build() -> None:
        x, h = time_major()
        rnn = layers.StaticRNN()
        with rnn.step():
            rnn.step_input(x)
            rnn.memory(init=h)

    with fresh(), pytest.raises(ProgramError, match="is never updated"):
        build()


def test_a_block_of_steps_that_writes_what_is_around_it_is_refused() -> None:
    def build() -> Any:
        x, h = rows()
        rnn = layers.DynamicRNN()
        with rnn.block():
            layers.assign(layers.scale(h, rnn.step_input(x).shape[1] * 1.0), h)

    with fresh(), pytest.raises(ProgramError, match="which is around it"):
        build()


def test_a_step_may_write_an_array_of_its_own() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [3, 2, 1], append_batch_size=False)
        rnn, zeros = layers.StaticRNN(), layers.fill_constant([2, 1], "float32", 0)
        with rnn.step():
            word, before = rnn.step_input(x), rnn.memory(init=zeros)
            zero, i, n = (layers.fill_constant([1], "int64", value) for value in (0, 1, 3))
            array = layers.array_write(word, zero)
            go_on = layers.less_than(i, n)
            with layers.While(go_on).block():
                layers.array_write(word + layers.cast(i, "float32"), i, array)
                layers.increment(i)
                layers.less_than(i, n, cond=go_on)
            last = layers.array_read(array, layers.fill_constant([1], "int64", 2))
            rnn.update_memory(before, last)
            rnn.output(last)
        rows = np.arange(6, dtype="f4").reshape(3, 2, 1)
        (made,) = fluid.Executor().run(main, {"x": rows}, [rnn()])
    np.testing.assert_array_equal(made, rows + 2)
