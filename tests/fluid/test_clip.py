"""Clipping and updates: their operators, scopes and parameters."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh

clip = fluid.clip
ROWS = np.array([[1.0, 2.0], [3.0, -4.0]], np.float32)


def line() -> fluid.Variable:
    """Builds a loss of two parameters, `b` and `w`."""
    x = layers.data("x", [2])
    return layers.mean(layers.fc(x, 1, param_attr="w", bias_attr="b"))


def scoped(program: fluid.Program, part: str) -> list[tuple[str, list[str]]]:
    """Returns types and role variables of the operators whose scope contains a text."""
    ops = program.global_block().ops
    return [(op.type, op.attr("op_role_var")) for op in ops if part in op.attr("op_namescope")]


def gradients(strategy: Any, legacy: bool) -> list[np.ndarray]:
    """Returns the gradients that `sgd` receives for b and w."""
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        loss = line()
        if legacy:
            clip.set_gradient_clip(strategy)
            fluid.optimizer.SGD(0.1).minimize(loss)
        else:
            fluid.optimizer.SGD(0.1, grad_clip=strategy).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup)
        taken = [op.input("Grad")[0] for op in main.global_block().ops if op.type == "sgd"]
        return exe.run(main, feed={"x": ROWS}, fetch_list=taken)


@pytest.mark.parametrize("legacy", [False, True], ids=["grad_clip", "set_gradient_clip"])
def test_both_ways_clip_alike(legacy: bool) -> None:
    bias, weight = np.ones(1), ROWS.mean(0)[:, None]
    norm = np.sqrt((bias**2).sum() + (weight**2).sum())
    wanted: dict[Any, list[Any]] = {
        clip.GradientClipByValue(0.5): [np.clip(bias, -0.5, 0.5), np.clip(weight, -0.5, 0.5)],
        clip.GradientClipByNorm(1.5): [bias, weight * 1.5 / np.linalg.norm(weight)],
        clip.GradientClipByGlobalNorm(1.0): [bias / norm, weight / norm],
    }
    for strategy, values in wanted.items():
        for made, value in zip(gradients(strategy, legacy), values, strict=True):
            np.testing.assert_allclose(made, value, rtol=1e-6)


def test_clipping_is_about_the_clipped_gradients() -> None:
    with fresh() as (main, _):
        loss = line()
        fluid.optimizer.SGD(0.1, grad_clip=clip.GradientClipByGlobalNorm(1.0)).minimize(loss)
    bias, weight = ["b", "elementwise_mul_0.tmp_0"], ["w", "elementwise_mul_1.tmp_0"]
    assert scoped(main, "gradient_clip") == [
        ("square", bias), ("reduce_sum", bias), ("square", weight), ("reduce_sum", weight),
        ("sum", weight), ("sqrt", weight), ("fill_constant", weight), ("elementwise_max", weight),
        ("elementwise_div", weight), ("elementwise_mul", bias), ("elementwise_mul", weight),
    ]  # fmt: skip
    assert scoped(main, "@CLIP") == []
    assert scoped(main, "optimizer") == [("sgd", bias), ("sgd", weight)]


def test_what_two_optimizers_clip_is_told_apart() -> None:
    with fresh() as (main, _):
        out = layers.fc(layers.data("x", [2]), 1, param_attr="w", bias_attr=False)
        for loss in (layers.mean(out), layers.mean(layers.square(out))):
            fluid.optimizer.SGD(0.1, grad_clip=clip.GradientClipByNorm(1.0)).minimize(loss)
    made = ["clip_by_norm_0.tmp_0", "clip_by_norm_1.tmp_0"]
    assert scoped(main, "gradient_clip") == [("clip_by_norm", ["w", name]) for name in made]
    assert scoped(main, "optimizer") == [("sgd", ["w", name]) for name in made]


def test_the_old_way_says_that_trainers_clip() -> None:
    with fresh() as (main, _):
        loss = line()
        clip.set_gradient_clip(clip.GradientClipByValue(0.1), ["w"])
        fluid.optimizer.SGD(0.1, regularization=fluid.regularizer.L2Decay(0.1)).minimize(loss)
    assert scoped(main, "@CLIP") == [("clip", ["w", "clip_0.tmp_0"])]
    kinds = [op_type for op_type, _ in scoped(main, "regularization")]
    assert kinds == ["scale", "sum", "scale", "sum"]
    assert scoped(main, "optimizer") == [("sgd", ["b", "b@GRAD"]), ("sgd", ["w", "clip_0.tmp_0"])]


def test_a_gradient_of_rows_is_made_whole_for_its_norm_only() -> None:
    with fresh() as (main, _):
        ids = layers.data("ids", [3], dtype="int64")
        rows = fluid.embedding(ids, size=[5, 2], is_sparse=True, param_attr="rows")
        grad_clip = clip.GradientClipByGlobalNorm(1.0)
        fluid.optimizer.SGD(0.1, grad_clip=grad_clip).minimize(layers.mean(rows))
    kinds = [op_type for op_type, _ in scoped(main, "gradient_clip")]
    assert kinds[:3] == ["merge_selected_rows", "get_tensor_from_selected_rows", "square"]
    rows_type = fluid.core.VarDesc.VarType.SELECTED_ROWS
    (update,) = (op for op in main.global_block().ops if op.type == "sgd")
    assert main.global_block().var(update.input("Grad")[0]).type == rows_type


def test_groups_are_clipped_apart_and_agree_in_their_norm() -> None:
    with fresh() as (main, _):
        loss = line()
        for name in "bw":
            clip.set_gradient_clip(clip.GradientClipByGlobalNorm(1.0, group_name=name), [name])
        fluid.optimizer.SGD(0.1).minimize(loss)
    assert [kind for kind, _ in scoped(main, "@CLIP")].count("sqrt") == 2
    with fresh():
        loss = line()
        clip.set_gradient_clip(clip.GradientClipByGlobalNorm(1.0), ["b"])
        clip.set_gradient_clip(clip.GradientClipByGlobalNorm(2.0), ["w"])
        with pytest.raises(ValueError, match="have one norm, and are clipped by"):
            fluid.optimizer.SGD(0.1).minimize(loss)


def test_some_gradients_need_no_clipping() -> None:
    with fresh() as (main, _):
        loss = line()
        grad_clip = clip.GradientClipByValue(0.1, need_clip=lambda p: p.name == "b")
        fluid.optimizer.SGD(0.1, grad_clip=grad_clip).minimize(loss)
    assert [about for _, about in scoped(main, "gradient_clip")] == [["b", "clip_0.tmp_0"]]


def test_what_does_not_clip() -> None:
    with fresh():
        loss = line()
        with pytest.raises(TypeError, match="clip is of type float, not GradientClipBase"):
            clip.set_gradient_clip(0.1)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"a member of param_list is of type \w+, not Parameter"
        ):
            clip.set_gradient_clip(clip.GradientClipByValue(1.0), ["x"])
        with pytest.raises(TypeError, match=r"grad_clip is of type \w+, not GradientClipBase"):
            fluid.optimizer.SGD(0.1, grad_clip=0.1)
        with pytest.raises(TypeError, match="need_clip is a function"):
            clip.GradientClipByNorm(1.0, need_clip="w")  # type: ignore[arg-type]
        fluid.optimizer.SGD(0.1).minimize(loss)
        with pytest.warns(UserWarning, match="set_gradient_clip comes after minimize"):
            clip.set_gradient_clip(clip.GradientClipByValue(1.0))


def test_a_rate_of_its_own_is_made_among_the_schedules() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [2])
        attr = fluid.ParamAttr(name="w", learning_rate=2.0)
        optimizer = fluid.optimizer.Adamax(0.1)
        loss = layers.mean(layers.fc(x, 1, param_attr=attr, bias_attr=False))
        ops, pairs = optimizer.minimize(loss)
    assert [op.type for op in ops] == ["scale", "adamax", "scale"]
    assert ops[0].attr("op_role") == 18
    assert ops[0].attr("op_namescope").endswith("scale_with_param_lr/")
    rate = optimizer._global_learning_rate(main)
    assert rate is not None
    assert ops[0].input("X") == [rate.name]
    assert ops[1].input("LearningRate") == ops[0].output("Out")
    assert [p.name for p, _ in pairs] == ["w"]


def test_the_table_on_servers_is_updated_by_sgd_whatever_the_optimizer() -> None:
    with fresh() as (main, _):
        ids = layers.data("ids", [3], dtype="int64")
        rows = fluid.embedding(
            ids, size=[5, 2], is_sparse=True, is_distributed=True, param_attr="table"
        )
        loss = layers.mean(layers.fc(rows, 1, param_attr="w", bias_attr=False))
        grad_clip = clip.GradientClipByValue(0.1)
        ops, _ = fluid.optimizer.Adam(0.1, grad_clip=grad_clip).minimize(loss)
    assert [(op.type, op.input("Param")) for op in ops] == [("adam", ["w"]), ("sgd", ["table"])]
    assert [op.type for op in main.global_block().ops][-3:] == ["sgd", "clip", "adam"]


def test_what_an_optimizer_does_not_take() -> None:
    with fresh():
        loss = line()
        wrong: list[dict[str, Any]] = [
            {"learning_rate": "fast"}, {"regularization": 0.1}, {"parameter_list": "w"},
        ]  # fmt: skip
        for given in wrong:
            with pytest.raises(TypeError, match="is of type"):
                fluid.optimizer.SGD(**{"learning_rate": 0.1, **given})
        optimizer = fluid.optimizer.SGD(0.1)
        with pytest.raises(TypeError, match=r"startup_program is of type \w+, not Program"):
            optimizer.minimize(loss, "startup")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="depends on no parameter"):
            optimizer.apply_gradients([])
