"""`While` and `while_loop`: results and gradients, against the unrolled program."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.ir import parse
from tests.fluid.nets import fresh
from tests.fluid.unrolled import gradients, same

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 3)).astype("f4")
W = {"w": RANDOM.normal(size=(3, 3)).astype("f4") / 2, "b": np.ones(3, "f4") / 8}


def data() -> fluid.Variable:
    return layers.data("x", [3], stop_gradient=False)


def step(h: fluid.Variable) -> fluid.Variable:
    return layers.fc(h, 3, act="tanh", param_attr="w", bias_attr="b")


def mean(h: fluid.Variable) -> fluid.Variable:
    return layers.mean(layers.square(h))


def unrolled(turns: int) -> fluid.Variable:
    h = data()
    for _ in range(turns):
        h = step(h)
    return mean(h)


def counted(turns: int, begin: Any = None) -> fluid.Variable:
    """Returns the loss of a net whose state a While overwrites."""
    h = layers.assign(data())
    i = layers.fill_constant([1], "int64", 0) if begin is None else begin
    n = layers.fill_constant([1], "int64", turns)
    go_on = layers.less_than(i, n)
    loop = layers.While(go_on)
    with loop.block():
        layers.assign(step(h), h)
        layers.increment(i)
        layers.less_than(i, n, cond=go_on)
    return mean(h)


def test_a_while_has_the_gradients_of_its_turns() -> None:
    made = gradients(lambda: counted(3), {"x": X}, W, ["x"])
    same(made, gradients(lambda: unrolled(3), {"x": X}, W, ["x"]))


@pytest.mark.few(1)
@pytest.mark.parametrize("turns", [0, 3, 70])
def test_a_while_that_only_a_run_can_count_has_the_same_gradients(turns: int) -> None:
    """70 turns are more than are stored, so that some are recomputed."""

    def build() -> fluid.Variable:
        begin = layers.data("begin", [1], dtype="int64", append_batch_size=False)
        return counted(turns, layers.assign(begin))

    feed = {"x": X, "begin": np.zeros(1, "i8")}
    net = unrolled if turns == 3 else counted
    same(gradients(build, feed, W, ["x"]), gradients(lambda: net(turns), {"x": X}, W, ["x"]))


def test_a_while_that_counts_in_fractions_has_the_gradients_of_all_its_turns() -> None:
    """A hundred times 0.01 is less than 1 in float32, so there are a hundred and one turns."""
    with fresh() as (main, _):
        x = layers.data("x", [1], append_batch_size=False, stop_gradient=False)
        i, end = (layers.fill_constant([1], "float32", value) for value in (0.0, 1.0))
        total = layers.fill_constant([1], "float32", 0.0)
        total.stop_gradient = False
        go_on = layers.less_than(i, end)
        with layers.While(go_on).block():
            layers.assign(layers.elementwise_add(total, x), total)
            layers.increment(i, 0.01)
            layers.less_than(i, end, cond=go_on)
        (grad,) = fluid.gradients(total, x)
        made = fluid.Executor().run(main, {"x": np.ones(1, "f4")}, [total, grad])
    assert [each.tolist() for each in made] == [[101.0], [101.0]]


def test_a_while_loop_reads_a_value_that_its_turns_do_not_change() -> None:
    def build() -> fluid.Variable:
        x = data()
        i, n = (layers.fill_constant([1], "int64", value) for value in (0, 3))
        _, h = layers.while_loop(
            lambda i, _: layers.less_than(i, n),
            lambda i, h: [i + 1, step(h) + x],
            [i, layers.assign(x)],
        )
        return mean(h)

    def oracle() -> fluid.Variable:
        x = h = data()
        for _ in range(3):
            h = step(h) + x
        return mean(h)

    same(gradients(build, {"x": X}, W, ["x"]), gradients(oracle, {"x": X}, W, ["x"]))


def test_variables_of_a_while_loop_may_change_places() -> None:
    with fresh() as (main, _):
        a, b = (layers.fill_constant([1], "float32", value) for value in (1, 2))
        i, n = (layers.fill_constant([1], "int64", value) for value in (0, 3))
        layers.while_loop(
            lambda *now: layers.less_than(now[0], n), lambda i, a, b: [i + 1, b, a], [i, a, b]
        )
        made = fluid.Executor().run(main, fetch_list=[a, b])
    assert [float(each) for each in made] == [2, 1]


def test_what_is_fed_may_be_the_counter() -> None:
    """The loss is the square of the last turn's number; only the counter's gradient is nonzero."""

    def build() -> fluid.Variable:
        i = fluid.data("i", [1], "float32")
        x = fluid.data("x", [1], "float32")
        i.stop_gradient = x.stop_gradient = False
        n = layers.fill_constant([1], "float32", 11)
        _, square = layers.while_loop(
            lambda i, _: layers.less_than(i, n),
            lambda i, _: [layers.increment(layers.assign(i)), layers.elementwise_mul(i, i)],
            [i, x],
        )
        return layers.mean(square)

    one = np.ones(1, "f4")
    made = gradients(build, {"i": one, "x": one}, {}, ["i", "x"])
    assert {name: value.item() for name, value in made.items()} == {"loss": 100, "i": 20, "x": 0}


def written(turns: int) -> fluid.Variable:
    """Returns the loss of a net that keeps every turn's state in an array."""
    i = layers.fill_constant([1], "int64", 0)
    n = layers.fill_constant([1], "int64", turns)
    states = layers.array_write(layers.assign(data()), i)
    go_on = layers.less_than(i, n)
    with layers.While(go_on).block():
        before = layers.array_read(states, i)
        layers.increment(i)
        layers.array_write(step(before), i, states)
        layers.less_than(i, n, cond=go_on)
    one = layers.fill_constant([1], "int64", 1)
    return mean(layers.array_read(states, i)) + mean(layers.array_read(states, one))


def test_arrays_carry_gradients_from_turn_to_turn() -> None:
    def oracle() -> fluid.Variable:
        states = [data()]
        for _ in range(3):
            states.append(step(states[-1]))
        return mean(states[-1]) + mean(states[1])

    made = gradients(lambda: written(3), {"x": X}, W, ["x"])
    same(made, gradients(oracle, {"x": X}, W, ["x"]))


def test_an_array_counts_what_was_written() -> None:
    with fresh() as (main, _):
        one, five = (layers.fill_constant([1], "int64", n) for n in (1, 5))
        array = layers.create_array("float32")
        before = layers.array_length(array)
        layers.array_write(layers.fill_constant([2], "float32", 7), five, array)
        layers.array_write(layers.fill_constant([2], "float32", 8), one, array)
        fetched = [before, layers.array_length(array), layers.array_read(array, five)]
        made = fluid.Executor().run(main, fetch_list=fetched)
    assert [each.tolist() for each in made] == [[0], [6], [7, 7]]


def test_what_is_read_beyond_the_end_of_an_array_is_no_number() -> None:
    with fresh() as (main, _):
        first, beyond = (layers.fill_constant([1], "int64", n) for n in (0, 7))
        array = layers.array_write(layers.fill_constant([2], "float32", 7), first)
        (made,) = fluid.Executor().run(main, fetch_list=[layers.array_read(array, beyond)])
    assert np.isnan(made).all()


def test_loops_within_loops_have_gradients() -> None:
    def build() -> fluid.Variable:
        h = layers.assign(data())
        i, n = (layers.fill_constant([1], "int64", value) for value in (0, 2))
        go_on = layers.less_than(i, n)
        with layers.While(go_on).block():
            j = layers.fill_constant([1], "int64", 0)
            inner = layers.less_than(j, n)
            with layers.While(inner).block():
                layers.assign(step(h), h)
                layers.increment(j)
                layers.less_than(j, n, cond=inner)
            layers.increment(i)
            layers.less_than(i, n, cond=go_on)
        return mean(h)

    same(gradients(build, {"x": X}, W, ["x"]), gradients(lambda: unrolled(4), {"x": X}, W, ["x"]))


def test_a_loop_within_another_may_go_on_counting_where_it_was() -> None:
    """The inner loop's counter is set once, so that only the outer's first turn runs it."""

    def build() -> fluid.Variable:
        x = data()
        i, j = (layers.fill_constant([1], "int64", 0) for _ in range(2))
        one, three = (layers.fill_constant([1], "int64", value) for value in (1, 3))
        states = layers.array_write(layers.assign(x), i)
        outer, inner = layers.less_than(i, one), layers.less_than(j, three)
        with layers.While(outer).block():
            layers.increment(i)
            layers.less_than(i, one, cond=outer)
            with layers.While(inner).block():
                before = layers.array_read(states, j)
                layers.increment(j)
                layers.array_write(step(before), j, states)
                layers.less_than(j, three, cond=inner)
        return mean(layers.array_read(states, j))

    same(gradients(build, {"x": X}, W, ["x"]), gradients(lambda: unrolled(3), {"x": X}, W, ["x"]))


def test_each_value_of_a_variable_that_is_overwritten_has_its_own_gradient() -> None:
    def build() -> fluid.Variable:
        h = step(data())
        first = layers.square(h)
        layers.assign(layers.tanh(h), h)
        second = layers.square(h)
        layers.assign(layers.scale(h, 0.0), h)
        return layers.mean(first + layers.scale(second, 3.0))

    def oracle() -> fluid.Variable:
        h = step(data())
        second = layers.square(layers.tanh(h))
        return layers.mean(layers.square(h) + layers.scale(second, 3.0))

    same(gradients(build, {"x": X}, W, ["x"]), gradients(oracle, {"x": X}, W, ["x"]))


def test_gradients_end_within_a_block_where_a_variable_says_so() -> None:
    def stopped(h: fluid.Variable) -> fluid.Variable:
        made = step(h)
        made.stop_gradient = True
        return made

    def build() -> fluid.Variable:
        h = layers.assign(data())
        i, n = (layers.fill_constant([1], "int64", value) for value in (0, 2))
        go_on = layers.less_than(i, n)
        with layers.While(go_on).block():
            layers.assign(stopped(h) + layers.fc(h, 3, param_attr="w", bias_attr="b"), h)
            layers.increment(i)
            layers.less_than(i, n, cond=go_on)
        return mean(h)

    def oracle() -> fluid.Variable:
        h = data()
        for _ in range(2):
            h = stopped(h) + layers.fc(h, 3, param_attr="w", bias_attr="b")
        return mean(h)

    same(gradients(build, {"x": X}, W, ["x"]), gradients(oracle, {"x": X}, W, ["x"]))


def test_a_program_with_loops_and_their_gradients_prints_and_parses() -> None:
    with fresh() as (main, _):
        fluid.optimizer.SGD(0.1).minimize(written(3))
    made = ir_program(main)
    assert parse(str(made)) == made
    again = fluid.Program.parse_from_string(main.serialize_to_string())
    assert str(ir_program(again)) == str(made)


def test_a_clone_for_tests_runs_the_loop_without_its_gradient() -> None:
    with fresh() as (main, startup):
        loss = counted(3)
        fluid.optimizer.SGD(0.1).minimize(loss)
        exe, test = fluid.Executor(), main.clone(for_test=True)
        exe.run(startup)
        before = exe.run(test, {"x": X}, [loss])[0]
        assert exe.run(test, {"x": X}, [loss])[0] == before
        assert exe.run(main, {"x": X}, [loss])[0] == before
        assert exe.run(test, {"x": X}, [loss])[0] < before


def test_room_of_an_array_that_nothing_bounds_is_asked_for() -> None:
    with fresh():
        i = layers.data("i", [1], dtype="int64", append_batch_size=False)
        x = layers.fill_constant([2], "float32", 0)
        with pytest.raises(ProgramError, match="how large 'i' may become is not known"):
            layers.array_write(x, i)


def test_room_of_an_array_that_an_inner_loop_counts_without_a_bound_is_asked_for() -> None:
    def build() -> None:
        end = layers.data("end", [1], dtype="int64", append_batch_size=False)
        i, j = (layers.fill_constant([1], "int64", 0) for _ in range(2))
        two, states = layers.fill_constant([1], "int64", 2), layers.create_array("float32")
        outer, inner = layers.less_than(i, two), layers.less_than(j, end)
        with layers.While(outer).block():
            layers.assign(layers.fill_constant([1], "int64", 0), j)
            layers.less_than(j, end, cond=inner)
            with layers.While(inner).block():
                layers.array_write(layers.cast(j, "float32"), j, states)
                layers.increment(j)
                layers.less_than(j, end, cond=inner)
            layers.increment(i)
            layers.less_than(i, two, cond=outer)

    with fresh(), pytest.raises(ProgramError, match=r"array_write: how large '.*' may become"):
        build()


def test_room_of_an_array_whose_index_a_branch_changes_is_asked_for() -> None:
    def build() -> None:
        i, j = (layers.fill_constant([1], "int64", 0) for _ in range(2))
        three, states = layers.fill_constant([1], "int64", 3), layers.create_array("float32")
        go_on = layers.less_than(i, three)

        def write_further() -> None:
            layers.increment(j)
            layers.array_write(layers.cast(j, "float32"), j, states)

        with layers.While(go_on).block():
            layers.assign(i, j)
            layers.cond(layers.fill_constant([1], "bool", value=True), write_further)
            layers.increment(i)
            layers.less_than(i, three, cond=go_on)

    with fresh(), pytest.raises(ProgramError, match=r"array_write: how large '.*' may become"):
        build()


def test_a_block_that_never_writes_its_condition_is_refused() -> None:
    with fresh():
        n = layers.fill_constant([1], "int64", 1)
        block = layers.While(layers.less_than(n, n)).block()
        block.__enter__()
        layers.increment(n)
        with pytest.raises(ProgramError, match="never writes its condition"):
            block.__exit__(None, None, None)
