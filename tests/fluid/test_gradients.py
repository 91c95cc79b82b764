"""Gradients: of losses by parameters, of any variables by others, and callbacks on the way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import AssertedError
from jaxfleet.fluid import layers
from jaxfleet.fluid.framework.from_ir import write_back
from jaxfleet.fluid.framework.to_ir import ir_program
from tests.fluid.nets import fresh

ROWS = np.array([[1.0, 2.0], [3.0, -4.0]], np.float32)


def run(main: fluid.Program, startup: fluid.Program, fetch: list[Any]) -> list[np.ndarray]:
    with fluid.scope_guard(fluid.Scope()):
        exe = fluid.Executor()
        if startup.global_block().ops:
            exe.run(startup)
        return exe.run(main, feed={"x": ROWS}, fetch_list=fetch)


def data() -> fluid.Variable:
    x = layers.data("x", [2])
    x.stop_gradient = False
    return x


def test_gradients_of_targets_are_summed() -> None:
    with fresh() as (main, startup):
        x = data()
        square = layers.square(x)
        (made,) = fluid.gradients([square, layers.scale(square, 3.0)], x)
        (value,) = run(main, startup, [made])
    np.testing.assert_allclose(value, 4 * 2 * ROWS)


def test_the_gradient_of_a_target_may_be_given() -> None:
    with fresh() as (main, startup):
        x = data()
        given = layers.scale(x, 10.0)
        made = fluid.gradients(layers.square(x), [x], target_gradients=given)
        (value,) = run(main, startup, made)
    np.testing.assert_allclose(value, 2 * ROWS * 10 * ROWS)


def test_gradients_end_where_they_are_told_to() -> None:
    with fresh() as (main, startup):
        x = data()
        kept, ended = layers.square(x), layers.exp(x)
        y = layers.elementwise_add(kept, ended)
        made = fluid.gradients(y, [x, ended], no_grad_set={ended})
        assert made[1] is None
        (value,) = run(main, startup, [made[0]])
    np.testing.assert_allclose(value, 2 * ROWS)


def test_what_a_target_does_not_depend_on_has_no_gradient() -> None:
    with fresh():
        x, other = data(), layers.data("other", [2])
        other.stop_gradient = False
        found = fluid.gradients(layers.square(x), [other, x])
        assert found[0] is None
        assert found[1] is not None


def test_a_second_walk_takes_names_of_its_own() -> None:
    with fresh() as (main, startup):
        x = data()
        square = layers.square(x)
        (first,) = fluid.gradients(square, x)
        (second,) = fluid.gradients(layers.scale(square, 3.0), x)
        assert [x and x.name for x in (first, second)] == ["x@GRAD", "x@GRAD_0"]
        values = run(main, startup, [first, second])
    np.testing.assert_allclose(values[1], 3 * values[0])
    np.testing.assert_allclose(values[0], 2 * ROWS)


def test_two_losses_train_what_each_is_made_of() -> None:
    with fresh() as (main, startup):
        hidden = layers.fc(layers.data("x", [2]), 2, param_attr="w", bias_attr=False)
        losses = [layers.mean(layers.scale(hidden, factor)) for factor in (1.0, 5.0)]
        first, second = (fluid.backward.append_backward(loss)[0][1] for loss in losses)
        values = run(main, startup, [first, second])
    assert (first.name, second.name) == ("w@GRAD", "w@GRAD_0")
    np.testing.assert_allclose(values[1], 5 * values[0], rtol=1e-6)


def test_parts_are_added_before_they_are_read_and_those_of_parameters_at_the_end() -> None:
    with fresh() as (main, _):
        attr = fluid.ParamAttr(name="w")
        hidden = layers.fc(layers.data("x", [2]), 2, param_attr=attr, bias_attr=False)
        again = layers.fc(hidden, 2, param_attr=attr, bias_attr=False)
        loss = layers.mean(layers.elementwise_add(hidden, again))
        pairs = fluid.backward.append_backward(loss)
    backward = [op for op in main.global_block().ops if op._is_backward_op()]
    assert [op.type for op in backward] == [
        "fill_constant", "mean_grad", "elementwise_add_grad", "mul_grad", "sum", "mul_grad", "sum",
    ]  # fmt: skip
    assert backward[-1].output("Out") == ["w@GRAD"]
    assert backward[-1].attr("op_role_var") == ["w", "w@GRAD"]
    assert backward[-1].input("X") == ["w@GRAD@RENAME@block0@0", "w@GRAD@RENAME@block0@1"]
    assert [(p.name, g.name) for p, g in pairs] == [("w", "w@GRAD")]


def test_what_is_not_wanted_of_a_list_is_left_out_and_the_rest_is_in_its_place() -> None:
    with fresh() as (main, startup):
        hidden = layers.scale(data(), 1.0)
        fixed = layers.fill_constant([2, 3], "float32", 0.0)
        fixed.stop_gradient = True
        joined = layers.concat([fixed, hidden], axis=1)
        weights = layers.assign(np.arange(5, dtype=np.float32))
        (made,) = fluid.gradients(layers.elementwise_mul(joined, weights, axis=1), hidden)
        (op,) = (op for op in main.global_block().ops if op.type == "concat_grad")
        assert made is not None
        assert op.output("X@GRAD") == ["@EMPTY@", made.name]
        (value,) = run(main, startup, [made])
        copy = write_back(fluid.Program(), ir_program(main), origin=main)
        (back,) = (op for op in copy.global_block().ops if op.type == "concat_grad")
    np.testing.assert_array_equal(value, [[3, 4], [3, 4]])
    assert back.outputs == op.outputs


def test_gradients_have_gradients() -> None:
    with fresh() as (main, startup):
        x = data()
        hidden = layers.fc(x, 3, act="tanh", param_attr="w", bias_attr="b")
        joined = layers.concat([hidden, layers.square(hidden)], axis=1)
        (slope,) = fluid.gradients(layers.reduce_sum(joined), x)
        assert slope is not None
        penalty = layers.mean(layers.square(slope))
        pairs = fluid.backward.append_backward(penalty)
        found = run(main, startup, ["w", penalty, *(grad for _, grad in pairs)])

    def penalized(weight: jax.Array, bias: jax.Array) -> jax.Array:
        def total(x: jax.Array) -> jax.Array:
            hidden = jnp.tanh(x @ weight + bias)
            return (hidden + hidden**2).sum()

        return (jax.grad(total)(jnp.asarray(ROWS)) ** 2).mean()

    at = jnp.asarray(found[0]), jnp.zeros(3)
    np.testing.assert_allclose(found[1][0], penalized(*at), rtol=1e-5)
    for made, wanted in zip(found[2:], jax.grad(penalized, (0, 1))(*at), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-6)


def test_gradients_come_in_the_order_that_they_are_asked_for() -> None:
    with fresh() as (main, _):
        loss = layers.mean(layers.fc(layers.data("x", [2]), 1, param_attr="w", bias_attr="b"))
        main.global_block().create_parameter(name="idle", shape=[1], dtype="float32")
        found = fluid.backward.append_backward(loss, ["b", "idle", "w"])
    assert [p.name for p, _ in found] == ["b", "w"]


def test_callbacks_see_every_operator_of_gradients() -> None:
    seen = []
    with fresh():
        loss = layers.mean(layers.square(data()))

        def note(block: fluid.Block, context: Any) -> None:
            seen.append((block.ops[-1].type, dict(context)))

        fluid.backward.append_backward(loss, callbacks=[note])
    assert [op_type for op_type, _ in seen] == ["mean_grad", "square_grad"]
    assert seen[-1][1]["x@GRAD"] == "x"


def test_an_error_is_clipped_before_it_goes_on_back() -> None:
    with fresh() as (main, startup):
        x = data()
        hidden = layers.scale(x, 2.0)
        hidden._set_error_clip(fluid.clip.ErrorClipByValue(max=0.1))
        loss = layers.mean(layers.square(hidden))
        layers.create_parameter([1], "float32", name="unused")
        fluid.optimizer.SGD(0.1).backward(loss)
        values = run(main, startup, ["x@GRAD"])
    unclipped = 2 * (2 * ROWS) / ROWS.size
    np.testing.assert_allclose(values[0], 2 * np.clip(unclipped, -0.1, 0.1))
    with fresh():
        y = layers.scale(data(), 2.0)
        y.error_clip = 0.1
        loss = layers.mean(y)
        with pytest.raises(
            TypeError, match=r"error_clip of .* is of type \w+, not ErrorClipByValue"
        ):
            fluid.optimizer.SGD(0.1).backward(loss)


def test_what_gradients_are_not_of() -> None:
    with fresh() as (main, _):
        x = data()
        y = layers.square(x)
        with pytest.raises(TypeError, match="the loss is of type str, not Variable"):
            fluid.backward.append_backward("loss")  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match=r"must have \[1\]") as shape:
            fluid.backward.append_backward(y)
        assert isinstance(shape.value, AssertedError)
        loss = layers.mean(y)
        with pytest.raises(TypeError, match="a member of parameter_list is of type"):
            fluid.backward.append_backward(loss, [3])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="no_grad_set is of type"):
            fluid.backward.append_backward(loss, no_grad_set="x")
        with pytest.raises(TypeError, match="callbacks is of type"):
            fluid.backward.append_backward(loss, callbacks=print)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'w' is no parameter"):
            fluid.backward.append_backward(loss, ["w"])
        with pytest.raises(ValueError, match="1 targets are given"):
            fluid.gradients([y], [x], [x, x])
        with pytest.raises(ValueError, match="and its gradient"):
            fluid.gradients(y, x, loss)
        with pytest.raises(TypeError, match="inputs is of type str, not Variable"):
            fluid.gradients(y, "x")  # type: ignore[arg-type]
        other = fluid.Program().global_block().create_var(name="z", shape=[2])
        with pytest.raises(ValueError, match="'z' is of another program"):
            fluid.gradients(y, other)
        assert [op.type for op in main.global_block().ops] == ["square", "mean"]
