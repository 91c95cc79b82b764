"""Convolutional networks: their operators, and training."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers, nets
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh


def lenet(images: fluid.Variable, label: fluid.Variable) -> tuple[fluid.Variable, fluid.Variable]:
    """Returns the loss and the accuracy of a small LeNet, with a batch_norm in its middle."""
    x = nets.simple_img_conv_pool(images, 4, 3, 2, 2, act="relu")
    x = layers.batch_norm(layers.conv2d(x, 6, 3, padding=1, bias_attr=False), act="relu")
    x = layers.pool2d(x, 2, "avg", 2)
    out = layers.fc(x, 3, act="softmax")
    return layers.mean(layers.cross_entropy(out, label)), layers.accuracy(out, label)


def pictures(count: int) -> dict[str, np.ndarray]:
    """Draws squares that are bright at the top, at the left, or in the middle."""
    random = np.random.default_rng(3)
    label = random.integers(0, 3, (count, 1))
    images = random.normal(0, 0.3, (count, 1, 10, 10)).astype(np.float32)
    for row, (kind,) in enumerate(label):
        part = ((slice(0, 4), slice(None)), (slice(None), slice(0, 4)), (slice(3, 7), slice(3, 7)))
        images[row, 0][part[kind]] += 1
    return {"images": images, "label": label}


@pytest.mark.grid
def test_a_lenet_trains_and_is_tested_by_its_averages() -> None:
    scope = Scope()
    with fresh() as (main, startup), fluid.scope_guard(scope):
        main.random_seed = startup.random_seed = 1
        images = layers.data("images", [1, 10, 10])
        label = layers.data("label", [1], dtype="int64")
        loss, share = lenet(images, label)
        test = main.clone(for_test=True)
        fluid.optimizer.Adam(0.02).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup)
        feed = pictures(24)
        losses = [float(exe.run(main, feed=feed, fetch_list=[loss])[0][0]) for _ in range(25)]
        mean = np.asarray(scope["batch_norm_0.w_1"])
        (tested,) = exe.run(test, feed=feed, fetch_list=[share.name])
        np.testing.assert_array_equal(np.asarray(scope["batch_norm_0.w_1"]), mean)
    assert losses[-1] < 0.3 * losses[0]
    assert tested[0] > 0.9
    assert np.abs(mean).max() > 0
    types = [op.type for op in main.global_block().ops if op.attr("op_role") == 1]
    assert [t for t in types if "2d" in t or "norm" in t] == [
        "pool2d_grad", "batch_norm_grad", "conv2d_grad", "pool2d_grad", "conv2d_grad",
    ]  # fmt: skip


def test_gradient_operators_have_fluids_slots() -> None:
    with fresh() as (main, _):
        images = layers.data("images", [3, 8, 8])
        x = layers.conv2d(images, 2, 3, param_attr="w", bias_attr="b")
        x = layers.pool2d(layers.batch_norm(x, param_attr="scale", bias_attr="shift"), 2)
        x = layers.layer_norm(x, param_attr="s", bias_attr="t")
        fluid.optimizer.SGD(0.1).minimize(layers.mean(x))
        found = {op.type: op for op in main.global_block().ops}
    slots = {
        name: (sorted(found[name].inputs), sorted(found[name].outputs))
        for name in ("conv2d_grad", "pool2d_grad", "batch_norm_grad", "layer_norm_grad")
    }
    assert slots == {
        "conv2d_grad": (["Filter", "Input", "Output@GRAD"], ["Filter@GRAD"]),
        "pool2d_grad": (["Out", "Out@GRAD", "X"], ["X@GRAD"]),
        "batch_norm_grad": (["Bias", "SavedMean", "SavedVariance", "Scale", "X", "Y@GRAD"],
                            ["Bias@GRAD", "Scale@GRAD", "X@GRAD"]),
        "layer_norm_grad": (["Bias", "Mean", "Scale", "Variance", "X", "Y@GRAD"],
                            ["Bias@GRAD", "Scale@GRAD", "X@GRAD"]),
    }  # fmt: skip


def test_kept_statistics_are_read_by_the_gradient_only_where_they_normalize() -> None:
    with fresh() as (main, _):
        x = layers.fc(layers.data("x", [4]), 2)
        made = layers.batch_norm(x, use_global_stats=True, moving_mean_name="average")
        fluid.append_backward(layers.mean(made))
        found = {op.type: op for op in main.global_block().ops}
    assert found["batch_norm_grad"].input("Mean") == ["average"]
    assert found["batch_norm"].output("MeanOut") == ["average"]


def test_parameters_of_images_have_fluids_names_shapes_and_beginnings() -> None:
    with fresh() as (main, startup):
        images = layers.data("images", [4, 8, 8])
        layers.conv2d(images, 6, [3, 5], groups=2)
        layers.conv2d(images, 8, 3, groups=4, use_cudnn=False)
        layers.batch_norm(images)
        shapes = {p.name: p.shape for p in main.all_parameters()}
        trained = {p.name for p in main.all_parameters() if p.trainable}
        begun = {op.output("Out")[0]: op for op in startup.global_block().ops}
    assert shapes == {
        "conv2d_0.w_0": (6, 2, 3, 5), "conv2d_0.b_0": (6,),
        "depthwise_conv2d_0.w_0": (8, 1, 3, 3), "depthwise_conv2d_0.b_0": (8,),
        "batch_norm_0.w_0": (4,), "batch_norm_0.b_0": (4,),
        "batch_norm_0.w_1": (4,), "batch_norm_0.w_2": (4,),
    }  # fmt: skip
    assert set(shapes) - trained == {"batch_norm_0.w_1", "batch_norm_0.w_2"}
    spread = begun["conv2d_0.w_0"].attr("std")
    assert spread == pytest.approx((2 / (3 * 5 * 4)) ** 0.5)
    values = [begun[f"batch_norm_0.{n}"].attr("value") for n in ("w_0", "b_0", "w_1", "w_2")]
    assert values == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("padding", "shape", "attrs"),
    [
        (1, (8, 8), ("EXPLICIT", [1, 1])),
        ([0, 2], (6, 10), ("EXPLICIT", [0, 2])),
        ([1, 1, 2, 2], (8, 10), ("EXPLICIT", [1, 2])),
        ([0, 1, 2, 0], (7, 8), ("EXPLICIT", [0, 1, 2, 0])),
        ([[0, 0], [0, 0], [1, 0], [0, 2]], (7, 8), ("EXPLICIT", [1, 0, 0, 2])),
        ("same", (8, 8), ("SAME", [0, 0])),
        ("VALID", (6, 6), ("VALID", [0, 0])),
    ],
)
def test_every_form_of_padding(padding: Any, shape: tuple[int, int], attrs: Any) -> None:
    with fresh() as (main, _):
        made = layers.conv2d(layers.data("images", [3, 8, 8]), 2, 3, padding=padding)
        (op,) = (op for op in main.global_block().ops if op.type == "conv2d")
    assert made.shape == (-1, 2, *shape)
    assert (op.attr("padding_algorithm"), op.attr("paddings")) == attrs


def test_images_that_cannot_be_convolved() -> None:
    with fresh():
        images = layers.data("images", [3, 8, 8])
        with pytest.raises(ProgramError, match="3 channels and 4 filters are not 2 groups"):
            layers.conv2d(images, 4, 3, groups=2)
        with pytest.raises(ProgramError, match="padding is 'SAME', 'VALID' or numbers"):
            layers.conv2d(images, 4, 3, padding="half")
        with pytest.raises(ProgramError, match="only height and width can be padded"):
            layers.conv2d(images, 4, 3, padding=[[0, 0], [1, 0], [0, 0], [0, 0]])
        with pytest.raises(ProgramError, match="images of 4 axes"):
            layers.conv2d(layers.data("x", [3]), 4, 3)
        with pytest.raises(ValueError, match="pool_type is 'max' or 'avg'"):
            layers.pool2d(images, 2, "sum")
        with pytest.raises(ValueError, match="pool_size is needed"):
            layers.pool2d(images)
        with pytest.raises(TypeError, match="'input' of conv2d is of type int, not Variable"):
            layers.conv2d(3, 4, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layer",
    [lambda x: layers.conv2d(x, 4, 5), lambda x: layers.pool2d(x, 5)],
    ids=["conv2d", "pool2d"],
)
def test_a_window_that_does_not_fit(layer: Callable[[fluid.Variable], fluid.Variable]) -> None:
    why = "a window of 5x5 does not fit into images of 2x2"
    with fresh(), pytest.raises(ProgramError) as built:
        layer(fluid.data("images", [None, 1, 2, 2]))
    assert why in "".join(built.value.__notes__)
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        out, exe = layer(fluid.data("images", [None, 1, None, None])), fluid.Executor()
        if startup.global_block().ops:
            exe.run(startup)
        with pytest.raises(ProgramError, match=why):
            exe.run(main, feed={"images": np.ones((3, 1, 2, 2), np.float32)}, fetch_list=[out])


def test_a_large_window_on_images_of_unknown_size() -> None:
    with fresh():
        assert layers.conv2d(fluid.data("x", [None, 1, None, None]), 4, 31).shape == (-1, 4, -1, -1)


def test_a_group_of_convolutions() -> None:
    with fresh() as (main, _):
        images = layers.data("images", [3, 8, 8])
        made = nets.img_conv_group(
            images, [4, 6], 2, conv_act="relu", conv_with_batchnorm=[True, False],
            conv_batchnorm_drop_rate=[0.5, 0.0], pool_stride=2,
        )  # fmt: skip
        types = [op.type for op in main.global_block().ops]
    assert made.shape == (-1, 6, 4, 4)
    assert types == [
        "conv2d", "elementwise_add", "batch_norm", "relu", "dropout",
        "conv2d", "elementwise_add", "relu", "pool2d",
    ]  # fmt: skip
