"""Cases of fluid's own tests on whole trainings, on small nets; `peer_cases.md` lists them.

Their protocol: two servers and two trainers, five steps, constant initialisers; each
trainer takes every second sample, and the mean of their losses is that of one process on all.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.pserver.jobs import Build, Feed, run_alone, run_job, shared_out

STEPS = 5


def constant(value: float = 0.01) -> Any:
    return fluid.ParamAttr(initializer=fluid.initializer.Constant(value))


def dense(x: fluid.Variable, size: int, act: str | None = None) -> fluid.Variable:
    return layers.fc(x, size, act=act, param_attr=constant(), bias_attr=constant())


def drawn(rows: int, labels: int, **shapes: tuple[int, ...]) -> list[Feed]:
    """Returns batches of arrays of these shapes, with labels `y`; for `ids`, row numbers."""
    random = np.random.default_rng(0)
    found: list[Feed] = []
    for _ in range(STEPS):
        fed: dict[str, np.ndarray] = {"y": random.integers(0, labels, (rows, 1))}
        for name, shape in shapes.items():
            value = random.normal(size=(rows, *shape)).astype(np.float32)
            fed[name] = random.integers(0, 50, (rows, *shape)) if name == "ids" else value
        found.append(fed)
    return found


def check(build: Build, fed: list[Feed], most: float) -> None:
    job, alone = run_job(build, shared_out(fed, 2)), run_alone(build, fed)
    assert len(set(alone.losses[0])) == STEPS
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], rtol=0, atol=most)


def mnist(optimizer: Any) -> fluid.Variable:
    image, label = layers.data("image", [1, 12, 12]), layers.data("y", [1], dtype="int64")
    conv = fluid.nets.simple_img_conv_pool(
        image, 8, 5, pool_size=2, pool_stride=2, act="relu",
        param_attr=constant(0.02), bias_attr=constant(),
    )  # fmt: skip
    predicted = dense(conv, 10, act="softmax")
    loss = layers.mean(layers.cross_entropy(predicted, label))
    optimizer().minimize(loss)
    return loss


OPTIMIZERS = {
    "sgd": lambda: fluid.optimizer.SGD(0.05),
    "lars": lambda: fluid.optimizer.LarsMomentum(0.5, 0.9),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mnist_trains_through_servers_as_in_one_process(name: str) -> None:
    check(partial(mnist, OPTIMIZERS[name]), drawn(4, 10, image=(1, 12, 12)), 1e-5)


def ctr() -> fluid.Variable:
    ids, dense_in = layers.data("ids", [3], dtype="int64"), layers.data("dense", [5])
    label = layers.data("y", [1], dtype="int64")
    rows = fluid.embedding(ids, size=[2000, 10], param_attr=constant(0.05))
    x = layers.concat([layers.reshape(rows, [-1, 30]), dense_in], axis=1)
    predicted = dense(dense(x, 16, act="relu"), 2, act="softmax")
    loss = layers.mean(layers.cross_entropy(predicted, label))
    decay = fluid.regularizer.L2Decay(1e-3)
    fluid.optimizer.SGD(0.1, regularization=decay).minimize(loss)
    return loss


def test_ctr_with_l2_decay_trains_through_servers_as_in_one_process() -> None:
    check(
        ctr, drawn(4, 2, ids=(3,), dense=(5,)), 1e-6
    )  # for losses near 0.7; two sums differ by 1e-7


def word2vec(*, shares: bool = False) -> fluid.Variable:
    ids, label = layers.data("ids", [4], dtype="int64"), layers.data("y", [1], dtype="int64")
    words = layers.split(ids, 4, dim=1)
    shared = fluid.ParamAttr("shared_w", initializer=fluid.initializer.Constant(0.1))
    rows = [fluid.embedding(word, size=[1000, 16], param_attr=shared) for word in words]
    x = layers.concat([layers.reshape(row, [-1, 16]) for row in rows], axis=1)
    predicted = dense(dense(x, 16, act="sigmoid"), 50, act="softmax")
    loss = layers.mean(layers.cross_entropy(predicted, label))
    fluid.optimizer.SGD(0.1).minimize(loss)
    if shares:
        main = fluid.default_main_program()
        fluid.memory_optimize(main, {loss}, skip_grads=True)
        assert any(op.has_attr("instead_of") for op in main.global_block().ops)
    return loss


@pytest.mark.grid
@pytest.mark.parametrize("shares", [False, True])
def test_word2vec_trains_through_servers_as_in_one_process(shares: bool) -> None:
    check(partial(word2vec, shares=shares), drawn(4, 50, ids=(4,)), 1e-4)


def looked_up(name: str, count: int, width: int) -> fluid.Variable:
    """Returns lookups in a table of distinct rows, so that a lookup of a wrong row shows."""
    rows = np.random.default_rng(1).normal(size=(50, width)).astype(np.float32) / 10
    initializer = fluid.initializer.NumpyArrayInitializer(rows)
    ids = layers.data(name, [count], dtype="int64")
    table = fluid.ParamAttr("table", initializer=initializer)
    return fluid.embedding(ids, [50, width], param_attr=table)


def simnet() -> fluid.Variable:
    query, title, other = (
        dense(layers.softsign(layers.reduce_sum(looked_up(name, 5, 16), dim=1)), 8)
        for name in ("query", "title", "other")
    )
    near, far = (layers.reduce_sum(query * x, dim=1, keep_dim=True) for x in (title, other))
    loss = layers.mean(layers.relu(layers.scale(far - near, bias=0.1)))
    fluid.optimizer.SGD(0.2).minimize(loss)
    return loss


@pytest.mark.grid
def test_a_dense_simnet_trains_through_servers_as_in_one_process() -> None:
    random = np.random.default_rng(2)
    names = ("query", "title", "other")
    fed: list[Feed] = [{n: random.integers(0, 50, (4, 5)) for n in names} for _ in range(STEPS)]
    check(simnet, fed, 1e-5)


def text_classification() -> fluid.Variable:
    image = layers.reshape(looked_up("ids", 6, 8), [-1, 1, 6, 8])
    attrs = {"param_attr": constant(0.02), "bias_attr": constant()}
    read = layers.pool2d(layers.conv2d(image, 4, [3, 8], act="tanh", **attrs), [4, 1])
    predicted = dense(layers.reshape(read, [-1, 4]), 2, act="softmax")
    label = layers.data("y", [1], dtype="int64")
    loss = layers.mean(layers.cross_entropy(predicted, label))
    fluid.optimizer.Adagrad(0.01).minimize(loss)
    return loss


@pytest.mark.grid
def test_text_classification_trains_through_servers_as_in_one_process() -> None:
    check(text_classification, drawn(4, 2, ids=(6,)), 1e-6)
