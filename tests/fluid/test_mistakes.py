"""Errors name the user's line, and leave the program unchanged."""

import warnings
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid import layers
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

ROWS = np.ones((3, 4), np.float32)


def line(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", ()))


def test_shapes_that_do_not_fit() -> None:
    with fresh() as (main, _):
        x, y = layers.data("x", [4]), layers.data("y", [5])
        what = r"'elementwise_add' cannot take 'x' \[b,4\] and 'y' \[b,5\]"
        with pytest.raises(ValueError, match=what) as caught:
            layers.elementwise_add(x, y)
        assert "test_mistakes.py" in line(caught.value)
        assert "layers.elementwise_add(x, y)" in line(caught.value)
        assert not main.global_block().ops


def test_slots_and_attributes_that_an_operator_lacks() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [4])
        block = main.global_block()
        out = block.create_var(name="out")
        with pytest.raises(ProgramError, match="has no slot 'Z'"):
            block.append_op("relu", {"X": x, "Z": x}, {"Out": out})
        with pytest.raises(ProgramError, match="lacks its input 'X'"):
            block.append_op("relu", {}, {"Out": out})
        with pytest.raises(ProgramError, match="takes one variable as 'X', not 2"):
            block.append_op("relu", {"X": [x, x]}, {"Out": out})
        with pytest.raises(ProgramError, match="has no attribute 'axes'"):
            block.append_op("softmax", {"X": x}, {"Out": out}, {"axes": 1})


@pytest.mark.parametrize(
    ("layer", "more", "options", "message"),
    [
        ("elementwise_add", ["x"], {}, "'y' of elementwise_add is of type str, not Variable"),
        ("elementwise_add", [1.0], {}, "'y' of elementwise_add is of type float, not Variable"),
        ("relu", [], {"inplace": True}, "relu: got an unexpected keyword argument 'inplace'"),
        ("fc", [], {}, "fc: missing a required argument: 'size'"),
        ("mean", [None, 3], {}, "mean: too many positional arguments"),
        ("sums", [], {"out": "y"}, "'out' of sums is of type str, not Variable or None"),
    ],
)
def test_a_layer_that_is_called_wrongly(
    layer: str, more: list[Any], options: dict[str, Any], message: str
) -> None:
    with fresh() as (main, _):
        x = layers.data("x", [4])
        with pytest.raises(TypeError, match=message) as caught:
            getattr(layers, layer)(x, *more, **options)
        assert isinstance(caught.value, ProgramError)
        assert "test_mistakes.py" in line(caught.value)
        assert not main.global_block().ops


def test_lists_hold_variables() -> None:
    with fresh():
        x: list[Any] = [layers.data("x", [4]), "y"]
        with pytest.raises(TypeError, match="'input' of fc is of type str, not Variable or list"):
            layers.fc(x, 3)


def test_operators_that_are_none() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [4])
        with pytest.raises(ValueError, match="operator 'rellu' has not been registered") as caught:
            main.global_block().append_op("rellu", {"X": x}, {"Out": x})
        assert "relu" in line(caught.value)
        assert "test_mistakes.py" in line(caught.value)


def test_names_that_are_not_there() -> None:
    with fresh() as (main, _):
        layers.data("words", [4])
        with pytest.raises(ValueError, match="block 0 has no variable 'word'") as caught:
            main.global_block().var("word")
        assert "did you mean words?" in line(caught.value)
        with pytest.raises(TypeError, match="name is of type int, not str"):
            main.global_block().var(3)  # type: ignore[arg-type]


def test_a_variable_that_is_declared_otherwise_again() -> None:
    with fresh() as (main, _):
        layers.data("x", [4])
        with pytest.raises(ValueError, match="declared again with"):
            layers.data("x", [4], dtype="int64")
        assert main.global_block().var("x").dtype == "float32"


def test_what_is_fed_and_fetched() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        x = layers.data("x", [4])
        out = layers.fc(x, 2)
        exe = fluid.Executor()
        with pytest.raises(FeedError, match="is not in the scope"):
            exe.run(main, feed={"x": ROWS}, fetch_list=[out])
        exe.run(startup)
        with pytest.raises(FeedError, match=r"'x' .* is not fed"):
            exe.run(main, fetch_list=[out])
        with pytest.warns(UserWarning, match="'z' is fed, and the program has no such variable"):
            exe.run(main, feed={"x": ROWS, "z": ROWS}, fetch_list=[out])
        with pytest.raises(FeedError, match="'nothing' is fetched"):
            exe.run(main, feed={"x": ROWS}, fetch_list=["nothing"])
        with pytest.raises(TypeError, match=r"a feed is of type \w+, not Mapping"):
            exe.run(main, feed=ROWS, fetch_list=[out])  # type: ignore[arg-type]
        assert exe.run(main, feed={"x": ROWS}, fetch_list=[out])[0].shape == (3, 2)


def test_what_is_no_program() -> None:
    with pytest.raises(TypeError, match="a program is of type str, not Program"):
        fluid.program_guard("main").__enter__()  # type: ignore[arg-type]
    exe = fluid.Executor()
    with pytest.raises(TypeError, match="what an Executor runs is of type int, not Program or"):
        exe.run(3)  # type: ignore[arg-type]
    exe.close()
    with pytest.raises(RuntimeError, match="this Executor was closed"):
        exe.run(fluid.Program())


def test_a_loss_that_is_none() -> None:
    with fresh():
        x = layers.data("x", [4])
        with pytest.raises(ProgramError, match=r"must have \[1\]"):
            fluid.optimizer.SGD(0.1).minimize(layers.fc(x, 2))
        with pytest.raises(ProgramError, match="depends on no parameter"):
            fluid.optimizer.SGD(0.1).minimize(layers.mean(x))


@pytest.mark.parametrize("shape", [[], [-1, 3]])
def test_a_parameter_of_no_size(shape: list[int]) -> None:
    with fresh(), pytest.raises(ValueError, match="a parameter's shape is all numbers"):
        layers.create_parameter(shape, "float32")


def test_guards_give_back_what_was_there_when_their_body_fails() -> None:
    before: Any = fluid.default_main_program()
    with pytest.raises(KeyError), fresh():
        raise KeyError("in between")
    assert fluid.default_main_program() is before


def test_a_parameter_that_layers_share_has_one_shape() -> None:
    with fresh() as (main, _):
        x = fluid.data("x", [None, 4])
        layers.fc(x, 3, param_attr="w", bias_attr=False)
        with pytest.raises(ProgramError, match=r"'w' has shape \(4, 3\), and is declared again"):
            layers.fc(x, 7, param_attr="w", bias_attr=False)
        assert [op.type for op in main.global_block().ops] == ["mul"]


@pytest.mark.parametrize("ids", [[1, 5], [-1, 0]])
def test_rows_and_labels_that_are_not_there_are_seen(ids: list[int]) -> None:
    with fresh() as (main, startup):
        i = fluid.data("i", [None], "int64")
        rows = fluid.embedding(i, [5, 2], param_attr="t")
        label = layers.reshape(i, [-1, 1])
        wide = layers.fc(rows, 5)
        losses = [
            layers.cross_entropy(layers.softmax(wide * 0.0), label),
            layers.softmax_with_cross_entropy(wide, label),
            layers.gather(wide, i),
        ]
        exe, scope = fluid.Executor(), Scope()
    exe.run(startup, scope=scope)
    found = exe.run(main, {"i": np.array(ids)}, [rows, *losses], scope=scope)
    bad = [not 0 <= number < 5 for number in ids]
    assert np.isnan(found[0]).all(1).tolist() == bad
    assert np.isnan(found[1])[:, 0].tolist() == bad
    assert all(np.isnan(one[bad]).all() for one in found[2:])


def test_a_label_that_is_ignored_is_of_no_class() -> None:
    with fresh() as (main, startup):
        x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 1], "int64")
        wide = layers.fc(x, 3, param_attr="w")
        losses: list[Any] = [
            layers.cross_entropy(layers.softmax(wide), y, ignore_index=-1),
            layers.softmax_with_cross_entropy(wide, y, ignore_index=-1),
        ]
        fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.sums(losses)))
        exe, scope = fluid.Executor(), Scope()
    exe.run(startup, scope=scope)
    feed = {"x": ROWS, "y": np.array([[-1], [0], [-1]])}
    *found, slope = exe.run(main, feed, [*losses, "w@GRAD"], scope=scope)
    assert [(one[:, 0] == 0).tolist() for one in found] == [[True, False, True]] * 2
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("value", [None, "abc", {1}])
def test_what_is_no_number_is_not_fed(value: Any) -> None:
    with fresh() as (main, _):
        out = layers.scale(fluid.data("x", [1]), 2.0)
    with pytest.raises(FeedError, match=r"'x' is fed .*, which is no number"):
        fluid.Executor().run(main, {"x": value}, [out], scope=Scope())


def test_what_is_no_scope() -> None:
    with fresh() as (main, _):
        layers.fill_constant([1], "float32", 1.0)
    with pytest.raises(TypeError, match="a scope is of type dict, not Scope"):
        fluid.Executor().run(main, scope={})  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"name": 3}, "a parameter's name is of type"),
        ({"initializer": "x"}, "a parameter's initializer is of type"),
        ({"learning_rate": "x"}, "a parameter's learning_rate is of type"),
        ({"regularizer": "l2"}, "a parameter's regularizer is of type"),
    ],
)
def test_what_is_said_of_a_parameter_is_checked(said: dict[str, Any], what: str) -> None:
    with pytest.raises(TypeError, match=what):
        fluid.ParamAttr(**said)


@pytest.mark.parametrize("declare", [fluid.data, layers.data])
def test_what_is_fed_has_a_name_and_a_list_of_sizes(declare: Any) -> None:
    with fresh() as (main, _):
        with pytest.raises(TypeError, match="the name of what is fed is of type NoneType, not str"):
            declare(None, [4])
        with pytest.raises(TypeError, match="the shape of 'x' is of type int, not list or tuple"):
            declare("x", 4)
        assert not main.global_block().vars


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_layer_has_columns(size: Any) -> None:
    with fresh() as (main, _):
        x = fluid.data("x", [None, 4])
        with pytest.raises(ValueError, match="fc: size is"):
            layers.fc(x, size)
        assert not main.all_parameters()


def test_a_label_of_classes_is_whole_numbers() -> None:
    with fresh() as (main, _):
        x, label = fluid.data("x", [None, 3]), fluid.data("label", [None, 1])
        what = "cross_entropy: labels are classes, and 'label' is declared float32"
        with pytest.raises(TypeError, match=what) as caught:
            layers.cross_entropy(x, label)
        assert "test_mistakes.py" in line(caught.value)
        with pytest.raises(TypeError, match="softmax_with_cross_entropy: labels are classes"):
            layers.softmax_with_cross_entropy(x, label)
        assert not main.global_block().ops


def doubled(feed: dict[str, np.ndarray]) -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        out = layers.scale(fluid.data("y", [None, 1]), scale=2.0)
        fluid.Executor().run(main, feed=feed, fetch_list=[out])


def test_a_feed_that_lacks_an_axis_is_told_how_to_get_it() -> None:
    with pytest.raises(FeedError) as caught:
        doubled({"y": np.ones(4, np.float32)})
    assert "feed value.reshape(-1, 1)" in line(caught.value)


def test_a_feed_by_a_wrong_name_is_one_message() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FeedError, match=r"'y' .* is not fed, and there is no 'yy', which is"):
            doubled({"yy": ROWS})


def test_a_warning_stands_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="'z' is fed") as caught:
        doubled({"y": np.ones((4, 1), np.float32), "z": ROWS})
    assert [found.filename for found in caught] == [__file__]


def test_a_batch_without_rows_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="'y' is fed no rows: a mean over no rows is NaN"):
        doubled({"y": np.ones((0, 1), np.float32)})
