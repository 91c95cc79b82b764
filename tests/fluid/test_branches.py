"""`cond`, `case` and `switch_case`: the chosen branch, and only its gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh
from tests.fluid.unrolled import Array, gradients, same

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 3)).astype("f4")
W: dict[str, Array] = {"w": RANDOM.normal(size=(3, 3)).astype("f4")}
Branch = Callable[[fluid.Variable], fluid.Variable]


def dense(x: fluid.Variable) -> fluid.Variable:
    return layers.fc(x, 3, param_attr="w", bias_attr=False)


def twice(x: fluid.Variable) -> fluid.Variable:
    return layers.scale(x, 2.0)


def cubed(x: fluid.Variable) -> fluid.Variable:
    return layers.square(dense(x)) * x


def data() -> tuple[fluid.Variable, fluid.Variable]:
    number = layers.data("number", [1], dtype="int64", append_batch_size=False)
    return layers.data("x", [3], stop_gradient=False), number


def is_number(number: fluid.Variable, wanted: int) -> fluid.Variable:
    return layers.equal(number, layers.fill_constant([1], "int64", wanted))


def loss_of(made: fluid.Variable, x: fluid.Variable) -> fluid.Variable:
    """Returns a loss that also contains the weights and the data."""
    return layers.mean(layers.square(made + dense(x)))


def by_cond() -> fluid.Variable:
    x, number = data()
    hidden = dense(x)
    return loss_of(
        layers.cond(is_number(number, 0), lambda: cubed(hidden), lambda: twice(hidden)), x
    )


def by_case() -> fluid.Variable:
    x, number = data()
    hidden = dense(x)
    pairs = [(is_number(number, 0), lambda: cubed(hidden))]
    return loss_of(layers.case(pairs, lambda: twice(hidden)), x)


def by_switch_case() -> fluid.Variable:
    x, number = data()
    hidden = dense(x)
    return loss_of(layers.switch_case(number, [lambda: cubed(hidden), lambda: twice(hidden)]), x)


@pytest.mark.few(3)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("build", [by_cond, by_case, by_switch_case])
def test_a_branch_has_its_value_and_its_gradients(
    build: Callable[[], fluid.Variable], number: int
) -> None:
    def oracle() -> fluid.Variable:
        x, _ = data()
        return loss_of((cubed if number == 0 else twice)(dense(x)), x)

    feed = {"x": X, "number": np.array([number], "i8")}
    same(gradients(build, feed, W, ["x"]), gradients(oracle, feed, W, ["x"]))


def test_branches_return_structures_and_run_only_if_chosen() -> None:
    with fresh() as (main, _):
        count = layers.fill_constant([1], "float32", 0)
        one, two = (layers.fill_constant([1], "float32", value) for value in (1, 2))

        def counted(value: fluid.Variable) -> Any:
            layers.increment(count)
            return {"a": value, "b": (value + value, value)}

        made = layers.cond(layers.less_than(two, one), lambda: counted(one), lambda: counted(two))
        fetched = [made["a"], *made["b"], count]
        found = fluid.Executor().run(main, fetch_list=fetched)
    assert [float(each) for each in found] == [2, 4, 2, 1]


@pytest.mark.parametrize(("number", "wanted"), [(1, 10), (4, 40), (7, 40)])
def test_a_number_without_a_branch_takes_the_default(number: int, wanted: float) -> None:
    with fresh() as (main, _):
        index = layers.fill_constant([1], "int32", number)
        constant = {n: (lambda n=n: layers.fill_constant([1], "float32", 10 * n)) for n in (1, 4)}
        made = layers.switch_case(index, constant)
        assert float(fluid.Executor().run(main, fetch_list=[made])[0]) == wanted


def test_the_first_condition_that_holds_chooses() -> None:
    with fresh() as (main, _):
        numbers = [layers.fill_constant([1], "float32", value) for value in (1, 2, 3)]
        below = [layers.less_than(numbers[0], x) for x in numbers]
        pairs = [(one, lambda x=x: x + x) for one, x in zip(below, numbers, strict=True)]
        assert float(fluid.Executor().run(main, fetch_list=[layers.case(pairs)])[0]) == 4


def test_branches_that_return_other_shapes_are_refused() -> None:
    with fresh():
        x, number = data()
        holds = is_number(number, 0)
        with pytest.raises(ProgramError, match="'true_fn' returns"):
            layers.cond(holds, lambda: x, lambda: layers.fc(x, 7))
        with pytest.raises(ProgramError, match="'true_fn' returns"):
            layers.cond(holds, lambda: x, lambda: None)
        with pytest.raises(WrongTypeError, match="'true_fn' is not a function"):
            layers.cond(holds, x)  # type: ignore[arg-type]


def by_rows() -> fluid.Variable:
    """Returns the loss of a net that takes a logarithm where possible, and multiplies elsewhere."""
    x = layers.data("x", [3], stop_gradient=False)
    first = layers.slice(x, [1], [0], [1])
    choice = layers.IfElse(
        layers.less_than(layers.fill_constant_batch_size_like(x, [-1, 1], "float32", 0), first)
    )
    with choice.true_block():
        choice.output(
            layers.log(layers.slice(choice.input(x), [1], [0], [1])) + dense(choice.input(x))
        )
    with choice.false_block():
        choice.output(dense(layers.square(choice.input(x))))
    (made,) = choice()
    return layers.mean(layers.square(made) + x)


def of_each_row(rows: Array) -> Callable[[], fluid.Variable]:
    """Returns the same net without a branch, for rows of known signs."""

    def build() -> fluid.Variable:
        x = layers.data("x", [3], stop_gradient=False)
        made = []
        for at, row in enumerate(rows):
            one = layers.slice(x, [0], [at], [at + 1])
            if row[0] > 0:
                made.append(layers.log(layers.slice(one, [1], [0], [1])) + dense(one))
            else:
                made.append(dense(layers.square(one)))
        return layers.mean(layers.square(layers.concat(made)) + x)

    return build


@pytest.mark.few(1)
@pytest.mark.parametrize("signs", [[1, -1, -1, 1], [1, 1, 1, 1], [-1, -1, -1, -1]])
def test_rows_go_through_one_of_two_blocks(signs: list[int]) -> None:
    """Rows of the other block contribute no gradient of a logarithm below 0."""
    rows = X.copy()
    rows[:, 0] = np.abs(rows[:, 0]) * signs
    same(
        gradients(by_rows, {"x": rows}, W, ["x"]),
        gradients(of_each_row(rows), {"x": rows}, W, ["x"]),
    )


def test_a_block_of_rows_that_puts_them_together_is_refused() -> None:
    def build() -> None:
        x = layers.data("x", [1])
        choice = layers.IfElse(layers.less_than(x, x))
        with choice.true_block():
            choice.output(layers.mean(choice.input(x)))

    with fresh(), pytest.raises(ProgramError, match="'mean' puts the rows of a block together"):
        build()


@pytest.mark.parametrize(
    ("op_type", "mix"),
    [
        ("softmax", lambda x: layers.softmax(x, axis=0)),
        ("matmul", lambda x: layers.matmul(layers.matmul(x, x, transpose_y=True), x)),
        ("reduce_mean", lambda x: layers.cond(truth(), lambda: with_mean(x), lambda: x)),
    ],
)
def test_a_block_in_which_a_row_depends_on_others_is_refused(
    op_type: str, mix: Callable[[fluid.Variable], fluid.Variable]
) -> None:
    def build() -> None:
        x = layers.data("x", [3])
        choice = layers.IfElse(layers.less_than(layers.slice(x, [1], [0], [1]), truth("float32")))
        with choice.true_block():
            choice.output(mix(choice.input(x)))

    with fresh(), pytest.raises(ProgramError, match=f"'{op_type}' puts the rows of a block"):
        build()


def truth(dtype: str = "bool") -> fluid.Variable:
    return layers.fill_constant([1], dtype, 1)


def with_mean(x: fluid.Variable) -> fluid.Variable:
    return layers.elementwise_add(x, layers.reduce_mean(x, dim=0))
