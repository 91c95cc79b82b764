"""Sampled and hierarchical losses against loops over each row."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh
from tests.fluid.test_recurrent import set_value

RANDOM = np.random.default_rng(0)
CLASSES, DIM, ROWS = 6, 3, 4
Array = np.ndarray[Any, Any]


def drawn(*shape: int) -> Array:
    return RANDOM.normal(size=shape).astype("f4")


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def share_of(sampler: str, number: int) -> float:
    if sampler == "uniform":
        return 1 / CLASSES
    return float(np.log((number + 2) / (number + 1)) / np.log(CLASSES))


@pytest.mark.parametrize("sampler", ["uniform", "log_uniform"])
def test_nce_is_a_sum_over_true_and_drawn_classes(sampler: str) -> None:
    x, weight, bias = drawn(ROWS, DIM), drawn(CLASSES, DIM), drawn(CLASSES, 1)
    label = RANDOM.integers(0, CLASSES, (ROWS, 1))
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        cost = layers.nce(
            layers.data("x", [DIM]), layers.data("y", [1], dtype="int64"), CLASSES,
            param_attr="w", bias_attr="b", num_neg_samples=5, sampler=sampler, seed=7,
        )  # fmt: skip
        fluid.backward.append_backward(layers.mean(cost))
        exe = fluid.Executor()
        exe.run(startup)
        set_value("w", weight)
        set_value("b", bias)
        (op,) = (op for op in main.global_block().ops if op.type == "nce")
        names = [cost.name, op.output("SampleLabels")[0], "w@GRAD", "b@GRAD"]
        made, classes, slope, into_bias = exe.run(main, {"x": x, "y": label}, names)
    assert classes.shape == (ROWS, 6)
    np.testing.assert_array_equal(classes[:, :1], label)
    wanted, gradient, of_bias = np.zeros(ROWS), np.zeros((CLASSES, DIM)), np.zeros((CLASSES, 1))
    for row in range(ROWS):
        for place, number in enumerate(classes[row]):
            out = sigmoid(x[row] @ weight[number] + bias[number, 0])
            expected = 5 * share_of(sampler, number)
            wanted[row] -= np.log((out if place == 0 else expected) / (out + expected))
            by = expected * (out - 1) if place == 0 else out * (1 - out)
            gradient[number] += by / (out + expected) * x[row] / ROWS
            of_bias[number] += by / (out + expected) / ROWS
    np.testing.assert_allclose(made[:, 0], wanted, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(into_bias, of_bias, rtol=1e-4, atol=1e-6)


def test_other_runs_draw_other_classes_unless_a_seed_is_given() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        x, y = layers.data("x", [DIM]), layers.data("y", [1], dtype="int64")
        layers.nce(x, y, 1000, seed=3)
        layers.nce(x, y, 1000)
        exe = fluid.Executor()
        exe.run(startup)
        ops = [op for op in main.global_block().ops if op.type == "nce"]
        feed = {"x": drawn(ROWS, DIM), "y": np.zeros((ROWS, 1), "i8")}
        names = [op.output("SampleLabels")[0] for op in ops]
        first, second = exe.run(main, feed, names), exe.run(main, feed, names)
    np.testing.assert_array_equal(first[0], second[0])
    assert (first[1] != second[1]).any()


@pytest.mark.parametrize("is_custom", [False, True])
def test_hsigmoid_is_a_sum_over_the_decisions_of_a_way(*, is_custom: bool) -> None:
    x, nodes = drawn(ROWS, DIM), CLASSES if is_custom else CLASSES - 1
    weight, bias = drawn(nodes, DIM), drawn(nodes, 1)
    label = np.asarray([[0], [1], [4], [5]])
    # A complete tree as a heap: the leaf of class c is number c + CLASSES.
    ways = [[((c + CLASSES) >> (bit + 1)) - 1 for bit in range(3)] for c in label[:, 0]]
    turns = [[((c + CLASSES) >> bit) & 1 for bit in range(3)] for c in label[:, 0]]
    feed = {"x": x, "y": label}
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        own: dict[str, Any] = {}
        if is_custom:
            own = {"path_table": layers.data("t", [3], dtype="int64"), "is_custom": True,
                   "path_code": layers.data("c", [3], dtype="int64")}  # fmt: skip
            feed |= {"t": np.asarray(ways), "c": np.asarray(turns)}
        cost = layers.hsigmoid(
            layers.data("x", [DIM]), layers.data("y", [1], dtype="int64"), CLASSES,
            param_attr="w", bias_attr="b", **own,
        )  # fmt: skip
        fluid.backward.append_backward(layers.mean(cost))
        exe = fluid.Executor()
        exe.run(startup)
        set_value("w", weight)
        set_value("b", bias)
        made, slope = exe.run(main, feed, [cost, "w@GRAD"])
    wanted, gradient = np.zeros(ROWS), np.zeros_like(weight)
    for row in range(ROWS):
        for node, turn in zip(ways[row], turns[row], strict=True):
            if node < 0:  # fluid counts a missing decision as an even one
                wanted[row] += np.log(2)
                continue
            score = x[row] @ weight[node] + bias[node, 0]
            wanted[row] += np.log1p(np.exp(score)) - turn * score
            gradient[node] += (sigmoid(score) - turn) * x[row] / ROWS
    np.testing.assert_allclose(made[:, 0], wanted, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-6)


def test_a_sampler_that_is_not_there_is_refused() -> None:
    with fresh():
        x, y = layers.data("x", [DIM]), layers.data("y", [1], dtype="int64")
        with pytest.raises(ProgramError, match="nce: the sampler 'custom_dist' is not supported"):
            layers.nce(x, y, CLASSES, sampler="custom_dist", custom_dist=[0.5] * CLASSES)


def test_a_sampled_softmax_draws_classes_that_differ_and_says_how_often_they_come() -> None:
    count, drawn_classes = 20, 5
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        main.random_seed = 5
        x, y = layers.data("x", [count]), layers.data("y", [1], dtype="int64")
        layers.sampled_softmax_with_cross_entropy(x, y, drawn_classes)
        (op,) = (op for op in main.global_block().ops if op.type == "sample_logits")
        names = [op.output(n)[0] for n in ("Samples", "Probabilities", "SampledLogits")]
        exe = fluid.Executor()
        feed = {"x": drawn(2, count), "y": np.array([[3], [7]])}
        runs = [exe.run(main, feed, names) for _ in range(20)]
    frequent = np.zeros(count)
    for samples, shares, logits in runs:
        np.testing.assert_array_equal(samples[:, 0], [3, 7])
        np.testing.assert_array_equal(samples[0, 1:], samples[1, 1:])
        assert len(set(samples[0, 1:])) == drawn_classes
        frequent[samples[0, 1:]] += 1
        zipf = np.log((samples + 2) / (samples + 1)) / np.log(count + 1)
        if not np.allclose(shares, zipf * drawn_classes, rtol=1e-4):
            # All shares agree about the number of draws.
            tries = np.log1p(-shares.astype("f8")) / np.log1p(-zipf)
            np.testing.assert_allclose(tries, tries[0, 0].round(), rtol=1e-3)
        taken = np.take_along_axis(feed["x"], samples, 1) - np.log(shares)
        is_hit = samples[:, 1:] == samples[:, :1]
        np.testing.assert_allclose(logits[:, 1:][~is_hit], taken[:, 1:][~is_hit], rtol=1e-4)
        assert (logits[:, 1:][is_hit] < -1e19).all()
    # Classes that differ, by Zipf's law: of 400 such samples the least had 1.8, and half over 3.1.
    assert frequent[:5].mean() > 1.5 * frequent[5:].mean()
    assert any((runs[0][0] != run[0]).any() for run in runs[1:])


def test_classes_that_cannot_be_sampled_are_refused() -> None:
    with fresh():
        x, y = layers.data("x", [DIM]), layers.data("y", [1], dtype="int64")
        sampled = layers.sampled_softmax_with_cross_entropy
        with pytest.raises(ProgramError, match="num_true is 1, not 2"):
            sampled(x, y, 2, num_true=2)
        with pytest.raises(ProgramError, match="4 of 3 classes cannot be drawn"):
            sampled(x, y, 4)
        with pytest.raises(ProgramError, match="classes of your own are given in part"):
            sampled(x, y, 2, use_customized_samples=True)
