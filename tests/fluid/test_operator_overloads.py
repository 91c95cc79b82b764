"""Python's operators on Variables add fluid's operators, with the same results."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

X = np.asarray([[1.5, -2.0, 3.0], [0.5, 4.0, -1.0]], np.float32)
Y = np.asarray([[2.0, 3.0, -1.0], [1.0, 0.5, 2.0]], np.float32)
Formula = Callable[[Any, Any], Any]

CASES: dict[str, tuple[Formula, list[str]]] = {
    "x + y": (lambda x, y: x + y, ["elementwise_add"]),
    "x - y": (lambda x, y: x - y, ["elementwise_sub"]),
    "x * y": (lambda x, y: x * y, ["elementwise_mul"]),
    "x / y": (lambda x, y: x / y, ["elementwise_div"]),
    "x // y": (lambda x, y: x // y, ["elementwise_floordiv"]),
    "x % y": (lambda x, y: x % y, ["elementwise_mod"]),
    "x + 2": (lambda x, _: x + 2, ["scale"]),
    "2.5 + x": (lambda x, _: 2.5 + x, ["scale"]),
    "x - 2": (lambda x, _: x - 2, ["scale"]),
    "2 - x": (lambda x, _: 2 - x, ["scale"]),
    "x * 2": (lambda x, _: x * 2, ["scale"]),
    "numpy * x": (lambda x, _: np.float32(2) * x, ["scale"]),
    "x / 4": (lambda x, _: x / 4, ["scale"]),
    "-x": (lambda x, _: -x, ["scale"]),
    "1 / x": (lambda x, _: 1 / x, ["fill_constant_batch_size_like", "elementwise_div"]),
    "x ** 2": (lambda x, _: x**2, ["fill_constant", "elementwise_pow"]),
    "2.0 ** x": (lambda x, _: 2.0**x, ["fill_constant_batch_size_like", "elementwise_pow"]),
    "x < y": (lambda x, y: x < y, ["less_than"]),
    "x <= 3": (lambda x, _: x <= 3, ["fill_constant", "less_equal"]),
    "x > y": (lambda x, y: x > y, ["greater_than"]),
    "x >= 3": (lambda x, _: x >= 3, ["fill_constant", "greater_equal"]),
    "x == 3": (lambda x, _: x == 3, ["fill_constant", "equal"]),
    "x != y": (lambda x, y: x != y, ["not_equal"]),
    "as numbers": (lambda x, y: (x < y).astype("float32") + x, ["less_than", "cast",
                                                                "elementwise_add"]),
    "x[0]": (lambda x, _: x[0], ["slice"]),
    "x[:, 1:]": (lambda x, _: x[:, 1:], ["slice"]),
    "x[..., -1]": (lambda x, _: x[..., -1], ["slice"]),
    "x[:, ::2]": (lambda x, _: x[:, ::2], ["strided_slice"]),
    "x[:]": (lambda x, _: x[:], ["assign"]),
}  # fmt: skip


def test_each_operator_is_fluids_and_computes_it() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x, y = layers.data("x", [3]), layers.data("y", [3])
        block, made = main.global_block(), []
        for name, (formula, types) in CASES.items():
            before = len(block.ops)
            made.append(formula(x, y))
            assert [op.type for op in block.ops[before:]] == types, name
        found = fluid.Executor().run(main, feed={"x": X, "y": Y}, fetch_list=made)
    for (name, (formula, _)), value in zip(CASES.items(), found, strict=True):
        np.testing.assert_allclose(value, formula(X, Y), rtol=1e-6, err_msg=name)


def test_numbers_beside_what_is_whole() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [2], dtype="int64")
        made = [x + 2, x / 2, 10 - x]
        with pytest.raises(ProgramError, match=r"'x' is int64, and 0.5 is no whole number"):
            x * 0.5
        feed = {"x": np.asarray([[5, -7]])}
        found = fluid.Executor().run(main, feed=feed, fetch_list=made)
    assert [v.tolist() for v in found] == [[[7, -5]], [[2, -3]], [[5, 17]]]


def test_numpys_numbers_index_as_pythons_do() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [2, 3])
        made = x[np.int64(1), -1]
    (op,) = main.global_block().ops
    assert (made.shape, op.attr("starts"), op.attr("decrease_axis")) == ((3,), [1, -1], [0, 1])


def test_an_operand_of_fewer_axes_stands_beside_the_last_ones_or_the_rows() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [3])
        last = layers.data("last", [3], append_batch_size=False)
        rows = layers.data("rows", [-1], append_batch_size=False)
        made = [x + last, x * rows]
        with pytest.raises(ProgramError, match="the second operand has more axes"):
            last + x
        given = {"x": X, "last": Y[0], "rows": Y[:, 1]}
        found = fluid.Executor().run(main, feed=given, fetch_list=made)
    np.testing.assert_allclose(found[0], X + Y[0])
    np.testing.assert_allclose(found[1], X * Y[:, 1:2])


def test_gradients_go_through_arithmetic() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        w = layers.create_parameter([3], "float32", name="w")
        x = layers.data("x", [3])
        loss = layers.mean((2.0 - x * w) ** 2.0 / 3.0)
        ((_, grad),) = fluid.append_backward(loss)
        exe = fluid.Executor()
        exe.run(startup)
        value, found = exe.run(main, feed={"x": X}, fetch_list=[w, grad])
    wanted = (2 * (2 - X * value) * -X / 3).sum(0) / 6
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_variables_are_told_apart_and_not_walked_through() -> None:
    with fresh() as (main, _):
        x, y = layers.data("x", [3]), layers.data("y", [3])
        assert {x: 1, y: 2}[x] == 1
        assert not main.global_block().ops
        with pytest.raises(TypeError, match="not iterable"):
            list(x)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="goes with Variables and numbers, not with str"):
            x + "1"
        with pytest.raises(ProgramError, match="has 2 axes, and 3 are indexed"):
            x[0, 0, 0]
        with pytest.raises(ProgramError, match="indexed by numbers and ranges"):
            x[y]
