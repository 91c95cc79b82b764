"""Fluid's multi_batch_merge_pass: several computations of gradients, and one update."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import AssertedError, FeedError, FinalError, ProgramError
from jaxfleet.fluid import layers
from tests.fluid.parallel import Trained, batch, classifier, devices


def momentum() -> Any:
    return fluid.optimizer.Momentum(0.1, 0.9)


def merged(repeats: int) -> fluid.BuildStrategy:
    strategy = fluid.BuildStrategy()
    builder = strategy._finalize_strategy_and_create_passes()
    builder.insert_pass(0, "multi_batch_merge_pass").set("num_repeats", repeats)
    return strategy


def dropped() -> tuple[fluid.Variable, fluid.Variable]:
    """Returns a loss whose gradient by `w` is the mask of a dropout."""
    x = fluid.data("x", [None, 6])
    fluid.data("y", [None, 1], "int64")
    w = layers.create_parameter([6], "float32", "w")
    out = layers.elementwise_mul(layers.dropout(layers.ones_like(x), 0.5), w)
    return layers.mean(layers.reduce_sum(out, dim=1)), out


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2])
def test_repeats_of_what_is_fed_train_as_one_run_does(count: int) -> None:
    one, two = Trained(momentum), Trained(momentum)
    with devices(count):
        parallel = two.parallel(build_strategy=merged(3))
    for step in range(2):
        (loss,) = one.exe.run(one.main, batch(8, step), [one.loss], scope=one.scope)
        (found,) = parallel.run([two.loss.name], batch(8, step))
        np.testing.assert_allclose(found.mean(), loss[0], rtol=1e-5)
    for name, value in one.parameters().items():
        np.testing.assert_allclose(two.parameters()[name], value, rtol=1e-5, atol=1e-6)
    text = str(next(iter(parallel._replicas._known.get(two.main).values())).program)
    assert text.count("mul_grad") == 3 * text.count("ParamOut=") // 2
    assert text.count("c_allreduce_sum") == (4 if count > 1 else text.count("c_allreduce_sum"))


def test_each_repeat_drops_other_elements() -> None:
    net = Trained(lambda: fluid.optimizer.SGD(1.0), dropped)
    with devices(1):
        parallel = net.parallel(build_strategy=merged(4))
    before = net.parameters()["w"].copy()
    parallel.run([], batch(1))
    kept = before - net.parameters()["w"]  # the mean of four masks
    np.testing.assert_allclose(kept * 4, (kept * 4).round(), atol=1e-4)
    assert ((kept > 0.1) & (kept < 0.9)).any()


def drawn_in_a_loop(x: fluid.Variable) -> fluid.Variable:
    i, n = (layers.fill_constant([1], "int64", value) for value in (0, 1))
    _, made = layers.while_loop(
        lambda i, _: layers.less_than(i, n),
        lambda i, h: [i + 1, layers.dropout(h, 0.5)],
        [i, layers.assign(x)],
    )
    return made


def drawn_in_a_branch(x: fluid.Variable) -> fluid.Variable:
    zero, one = (layers.fill_constant([1], "float32", value) for value in (0.0, 1.0))
    made: fluid.Variable = layers.cond(
        layers.less_than(zero, one), lambda: layers.dropout(x, 0.5), lambda: layers.scale(x, 1.0)
    )
    return made


def drawn_in_a_branch_of_a_loop(x: fluid.Variable) -> fluid.Variable:
    i, n = (layers.fill_constant([1], "int64", value) for value in (0, 1))
    _, made = layers.while_loop(
        lambda i, _: layers.less_than(i, n),
        lambda i, h: [i + 1, drawn_in_a_branch(h)],
        [i, layers.assign(x)],
    )
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("draw", [drawn_in_a_loop, drawn_in_a_branch, drawn_in_a_branch_of_a_loop])
def test_each_repeat_drops_other_elements_in_sub_blocks_too(
    draw: Callable[[fluid.Variable], fluid.Variable],
) -> None:
    def net() -> tuple[fluid.Variable, fluid.Variable]:
        x = fluid.data("x", [None, 6])
        fluid.data("y", [None, 1], "int64")
        one = fluid.initializer.Constant(1.0)
        w = layers.create_parameter([6], "float32", "w", default_initializer=one)
        h = draw(layers.elementwise_mul(layers.ones_like(x), w))
        # The gradient of an element is 1 where both directions keep it, and -1 where backward,
        # which runs the block again, keeps one that forward has dropped.
        out = layers.elementwise_sub(layers.square(h), h)
        return layers.mean(layers.reduce_sum(out, dim=1)), out

    trained = Trained(lambda: fluid.optimizer.SGD(1.0), net)
    with devices(1):
        parallel = trained.parallel(build_strategy=merged(4))
    before = trained.parameters()["w"].copy()
    parallel.run([], batch(1))
    kept = before - trained.parameters()["w"]  # the mean of four masks
    np.testing.assert_allclose(kept * 4, (kept * 4).round(), atol=1e-4)
    assert ((kept > 0.1) & (kept < 0.9)).any()
    assert (kept > -0.1).all()


def test_a_batch_norm_needs_statistics_of_each_repeat() -> None:
    def net() -> tuple[fluid.Variable, fluid.Variable]:
        x, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1], "int64")
        out = layers.fc(layers.batch_norm(x, moving_mean_name="m"), 3, act="softmax")
        return layers.mean(layers.cross_entropy(out, y)), out

    trained = Trained(momentum, net)
    with devices(1):
        parallel = trained.parallel(build_strategy=merged(2))
    with pytest.raises(FeedError, match=r"'m\.repeat\.0' .* is not in the scope"):
        parallel.run([], batch(4))
    for name in ("m", "batch_norm_0.w_1"):  # initial values as in 1.8.5's own script
        for at in range(2):
            trained.scope[f"{name}.repeat.{at}"] = np.array(trained.scope[name])
    parallel.run([], batch(4))
    assert np.abs(np.asarray(trained.scope["m.repeat.1"])).max() > 0
    np.testing.assert_array_equal(np.asarray(trained.scope["m"]), np.zeros(6))


def test_what_a_builder_of_passes_refuses() -> None:
    strategy = fluid.BuildStrategy()
    builder = strategy._finalize_strategy_and_create_passes()
    with pytest.raises(FinalError, match="after a program was made with the strategy"):
        strategy.nccl_comm_num = 2
    with pytest.raises(ProgramError, match="there is no pass 'graph_viz_pass'"):
        builder.append_pass("graph_viz_pass")
    with pytest.raises(ProgramError, match="pass 2 cannot be inserted among 0"):
        builder.insert_pass(2, "multi_batch_merge_pass")
    added = builder.append_pass("multi_batch_merge_pass")
    assert [one.type() for one in builder.all_passes()] == ["multi_batch_merge_pass"]
    with pytest.raises(ProgramError, match="has no num_repeats=0"):
        added.set("num_repeats", 0)
    net = Trained(momentum, classifier)
    with pytest.raises(ProgramError, match="has no number of repeats"):
        net.parallel(build_strategy=strategy)
    added.set("num_repeats", 2)
    alone = fluid.CompiledProgram(net.main, strategy)
    with pytest.raises(AssertedError, match="that is not rewritten for devices"):
        net.exe.run(alone, batch(4), [net.loss], scope=net.scope)
    builder.remove_pass(0)
    assert builder.all_passes() == []
