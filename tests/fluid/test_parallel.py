"""Several devices match one if they share a batch evenly, else they behave as documented."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError
from jaxfleet.fluid import layers
from jaxfleet.fluid.lowering.feeding import part_sizes
from tests.fluid.nets import fresh
from tests.fluid.parallel import Feed, Trained, batch, devices, mean_of_parts, sgd

# Sums over devices have another order than sums over rows.
CLOSE: Any = {"rtol": 2e-5, "atol": 1e-6}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for name, value in left.items():
        np.testing.assert_allclose(right[name], value, err_msg=name, **CLOSE)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def adam_with_all() -> Any:
    """Clips by the norm of all gradients, which needs them whole, and decays its rate."""
    rate = layers.exponential_decay(0.05, 2, 0.9)
    clip = fluid.clip.GradientClipByGlobalNorm(0.1)
    decay = fluid.regularizer.L2Decay(0.01)
    return fluid.optimizer.Adam(rate, grad_clip=clip, regularization=decay)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [sgd, adam_with_all])
def test_devices_that_share_a_batch_evenly_train_as_one(optimizer: Any) -> None:
    one, four = Trained(optimizer), Trained(optimizer)
    with devices(4):
        parallel = four.parallel()
    assert parallel.device_count == 4
    for step in range(3):
        feed = batch(8, step)
        (loss,) = one.exe.run(one.main, feed, [one.loss], scope=one.scope)
        (losses, out) = parallel.run([four.loss, four.out.name], feed)
        assert losses.shape == (4,)
        assert out.shape == (8, 3)
        np.testing.assert_allclose(losses.mean(), loss[0], **CLOSE)
    same(one.parameters(), four.parameters())


@pytest.mark.grid
def test_the_last_device_gets_the_rows_that_are_left_over() -> None:
    feed, steps = batch(7), 2
    parts = [
        {n: v[at : at + size] for n, v in feed.items()} for at, size in ((0, 2), (2, 2), (4, 3))
    ]
    wanted, found = mean_of_parts(parts, [1 / 3] * 3, steps), Trained(sgd)
    with devices(3):
        parallel = found.parallel()
    for _ in range(steps):
        (losses, out) = parallel.run([found.loss, found.out], feed)
    assert losses.shape == (3,)
    assert out.shape == (7, 3)
    same(wanted.parameters(), found.parameters())


def test_a_list_feeds_each_device_its_own_rows() -> None:
    feeds: list[Feed] = [batch(5, 1), batch(2, 2)]
    wanted, found = mean_of_parts(feeds, [0.5, 0.5], 2), Trained(sgd)
    with devices(2):
        parallel = found.parallel()
    for _ in range(2):
        losses, out = parallel.run([found.loss, found.out], feeds)
    assert (losses.shape, out.shape) == ((2,), (7, 3))
    same(wanted.parameters(), found.parameters())
    with pytest.raises(FeedError, match="has 1 dicts for 2 devices"):
        parallel.run([found.loss], feeds[:1])
    with pytest.raises(TypeError, match="a member of the feed is of type int, not Mapping"):
        parallel.run([found.loss], [3, 4])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("rows", "count", "sizes"),
    [
        (3, 2, [1, 2]),
        (10, 4, [2, 2, 2, 4]),
        (5, 4, [1, 1, 1, 2]),
        (9, 4, [2, 2, 2, 3]),
        (10, 8, [1] * 7 + [3]),
        (2, 4, [1, 1]),
        (0, 4, []),
    ],
)
def test_rows_are_shared_out_over_devices_by_the_documented_rule(
    rows: int, count: int, sizes: list[int]
) -> None:
    assert part_sizes(rows, count) == sizes


def test_fewer_rows_than_devices() -> None:
    net = Trained(sgd)
    with devices(4):
        parallel = net.parallel()
        text = "'x' is fed 3 rows for 4 devices"
        with pytest.raises(ValueError, match=text):
            parallel.run([net.loss], batch(3))
        tested = net.parallel(main_program=net.test, loss_name=None)
    (out,) = tested.run([net.out], batch(3))
    (wanted,) = net.exe.run(net.test, batch(3), [net.out], scope=net.scope)
    np.testing.assert_allclose(out, wanted, **CLOSE)


def test_fewer_rows_than_devices_are_tested_on_fewer_devices() -> None:
    scope = fluid.Scope()
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.unique_name.guard():
        x = fluid.data("x", [None, 3])
        rate = layers.create_global_var([1], 0.1, "float32", persistable=True, name="rate")
        out = layers.relu(x)
        main, startup = fluid.default_main_program(), fluid.default_startup_program()
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    compiled = fluid.CompiledProgram(main).with_data_parallel(places=fluid.cpu_places(4))
    random = np.random.default_rng(0)
    for count in (1, 3, 4, 6, 11):
        rows = random.normal(size=(count, 3)).astype(np.float32)
        feed = {"x": rows} if count % 2 else {"x": rows, rate.name: floats(0.5)}
        (merged,) = exe.run(compiled, feed, [out], scope=scope)
        (parts,) = exe.run(compiled, feed, [out], scope=scope, return_merged=False)
        np.testing.assert_array_equal(merged, np.maximum(rows, 0))
        np.testing.assert_array_equal(np.concatenate(parts), merged)
        assert len(parts) == min(count, 4)


def test_unmerged_fetches_have_an_axis_of_devices() -> None:
    net = Trained(sgd)
    compiled = fluid.CompiledProgram(net.main).with_data_parallel(
        loss_name=net.loss.name, places=fluid.cpu_places(2)
    )
    fetch, feed = [net.loss, net.out], batch(64)
    apart = net.exe.run(compiled, feed, fetch, scope=net.scope, return_merged=False)
    assert [np.array(value).shape for value in apart] == [(2, 1), (2, 32, 3)]
    joined = net.exe.run(compiled, feed, fetch, scope=net.scope)
    assert [value.shape for value in joined] == [(2,), (64, 3)]


@pytest.mark.grid
def test_persistable_values_that_are_fed() -> None:
    def with_rate() -> Any:
        rate = layers.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
        return fluid.optimizer.SGD(rate)

    one, two = Trained(sgd), Trained(with_rate)
    with devices(2):
        parallel = two.parallel()
    feed = batch(4)
    one.exe.run(one.main, feed, scope=one.scope)
    parallel.run([two.loss], {**feed, "rate": floats(0.5)})
    same(one.parameters(), two.parameters())
    one.exe.run(one.main, feed, scope=one.scope)
    parallel.run([two.loss], {**feed, "rate": floats(0.5, 0.5)})
    same(one.parameters(), two.parameters())
    with pytest.raises(FeedError, match="'rate' is persistable and fed 3 values"):
        parallel.run([two.loss], {**feed, "rate": np.zeros(3, np.float32)})


def test_data_that_are_persistable_are_fed_to_all_devices_or_each() -> None:
    with fresh() as (main, _), devices(4):
        x, rate = fluid.data("x", [None, 2]), fluid.data("rate", [1])
        rate.persistable = True
        fetch = [layers.relu(x), layers.relu(rate)]
        compiled, exe = fluid.CompiledProgram(main).with_data_parallel(), fluid.Executor()
        for count, fed, wanted in (
            (2, floats(-1, 2), [0, 2]), (4, floats(1, 2, -3, 4), [1, 2, 0, 4]),
            (5, floats(3), [3, 3, 3, 3]),
        ):  # fmt: skip
            rows = np.full((count, 2), 5, np.float32)
            found = exe.run(compiled, {"x": rows, "rate": fed}, fetch)
            assert [value.tolist() for value in found] == [rows.tolist(), wanted]
        parts = [{"x": floats(at, at)[None], "rate": floats(at)} for at in (1, 2)]
        found = exe.run(compiled, parts, fetch)
        assert [value.tolist() for value in found] == [[[1, 1], [2, 2]], [1, 2]]
        (alone,) = exe.run(main, {"x": floats(1, 1)[None], "rate": floats(7)}, fetch[1:])
        assert alone.tolist() == [7]


def test_a_loader_that_ends_with_fewer_batches_than_devices_feeds_some() -> None:
    with fresh() as (main, _), devices(4):
        x = fluid.data("x", [None, 1])
        loader = fluid.io.DataLoader.from_generator(
            feed_list=[x], capacity=4, iterable=False, drop_last=False
        )
        out = layers.scale(x, 2.0)
        batches = [floats(at)[:, None] for at in range(6)]
        loader.set_batch_generator(lambda: iter([(one,) for one in batches]))
        compiled, exe = fluid.CompiledProgram(main).with_data_parallel(), fluid.Executor()
        loader.start()
        found = [exe.run(compiled, fetch_list=[out])[0].ravel().tolist() for _ in range(2)]
        assert found == [[0, 2, 4, 6], [8, 10]]
        with pytest.raises(fluid.core.EOFException):
            exe.run(compiled, fetch_list=[out])
        loader.reset()


@pytest.mark.grid
def test_what_the_gradient_of_the_loss_begins_with() -> None:
    feed, scales = batch(4), fluid.BuildStrategy.GradientScaleStrategy
    halves = [{n: v[at : at + 2] for n, v in feed.items()} for at in (0, 2)]
    for scale, weights in ((scales.One, [1.0, 1.0]), (scales.Customized, [0.25, 2.0])):
        found = Trained(sgd)
        build = fluid.BuildStrategy()
        build.gradient_scale_strategy = scale
        with devices(2):
            parallel = found.parallel(build_strategy=build)
        begun = {found.loss.name + "@GRAD": floats(*weights)} if scale == "Customized" else {}
        parallel.run([found.loss], {**feed, **begun})
        same(mean_of_parts(halves, weights, 1).parameters(), found.parameters())


def test_devices_draw_different_numbers_and_one_draws_as_an_executor() -> None:
    masks = Trained(sgd, _with_dropout)
    feed = {"x": np.ones((4, 64), np.float32)}
    with devices(2):
        parallel = masks.parallel(main_program=masks.main)
    first, second = (np.split(parallel.run([masks.out], feed)[0] != 0, 2) for _ in range(2))
    assert (first[0] != first[1]).any()
    assert (first[0] != second[0]).any()


def _with_dropout() -> tuple[fluid.Variable, fluid.Variable]:
    x = fluid.data("x", [None, 64])
    out = layers.dropout(layers.fc(x, 64, param_attr="w"), 0.5)
    return layers.mean(out), out


def test_one_device_gives_the_losses_of_an_executor() -> None:
    losses = []
    for way in ("plain", "compiled", "parallel"):
        net = Trained(sgd)
        program: Any = net.main
        if way != "plain":
            program = fluid.CompiledProgram(net.main)
        if way == "parallel":
            program.with_data_parallel(loss_name=net.loss.name, places=fluid.CPUPlace())
        run = [net.exe.run(program, batch(16, s), [net.loss], scope=net.scope) for s in range(3)]
        losses.append(np.ravel(run))
    np.testing.assert_array_equal(losses[0], losses[1])
    np.testing.assert_array_equal(losses[0], losses[2])


def test_fetched_results_do_not_change_with_later_runs() -> None:
    net = Trained(sgd)
    with devices(2):
        parallel = net.parallel()

    def alone(feed: Feed) -> list[np.ndarray]:
        return net.exe.run(net.main, feed, [net.loss, "w0"], scope=net.scope)

    def together(feed: Feed) -> list[np.ndarray]:
        return parallel.run([net.loss, "w0"], feed)

    for run in (alone, together):
        first = run(batch(4, 0))
        before = [value.copy() for value in first]
        run(batch(4, 1))
        for value, wanted in zip(first, before, strict=True):
            np.testing.assert_array_equal(value, wanted)
            assert value.flags.writeable


def test_local_scopes_are_made_by_runs_and_dropped() -> None:
    net = Trained(sgd)
    strategy = fluid.ExecutionStrategy()
    strategy.num_iteration_per_drop_scope = 10
    with devices(2):
        train = net.parallel(exec_strategy=strategy)
        train.run([net.loss], batch(4))
        test = net.parallel(main_program=net.test, loss_name=None, share_vars_from=train)
        test.run([net.out], batch(4))
    for parallel in (train, test):
        assert not parallel._need_create_local_exe_scopes()
        parallel.drop_local_exe_scopes()
        assert parallel._need_create_local_exe_scopes()
    for _ in range(9):
        train.run([net.loss], batch(4))
    assert train._need_create_local_exe_scopes()  # it was the tenth


@pytest.mark.grid
def test_an_executor_goes_on_where_devices_stopped_and_back() -> None:
    one, mixed = Trained(sgd), Trained(sgd)
    with devices(2):
        parallel = mixed.parallel()
    for step in range(4):
        feed = batch(4, step)
        one.exe.run(one.main, feed, scope=one.scope)
        if step % 2:
            mixed.exe.run(mixed.main, feed, scope=mixed.scope)
        else:
            parallel.run([], feed)
    same(one.parameters(), mixed.parameters())


def test_values_that_cannot_be_joined_are_fetched_apart() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 2])
        out = layers.transpose(x, [1, 0])
        compiled = fluid.CompiledProgram(fluid.default_main_program())
    compiled.with_data_parallel(places=fluid.cpu_places(2))
    exe, feed = (
        fluid.Executor(fluid.CPUPlace()),
        {"x": np.arange(6, dtype=np.float32).reshape(3, 2)},
    )
    with pytest.raises(FeedError, match="cannot be joined along axis 0"):
        exe.run(compiled, feed, [out])
    (parts,) = exe.run(compiled, feed, [out], return_merged=False)
    assert [part.tolist() for part in parts] == [[[0], [1]], [[2, 4], [3, 5]]]


def _normalized() -> tuple[fluid.Variable, fluid.Variable]:
    x = fluid.data("x", [None, 6])
    hidden = layers.batch_norm(
        layers.fc(x, 4, param_attr="w"), moving_mean_name="mean", moving_variance_name="spread"
    )
    out = layers.fc(hidden, 1, act="tanh", param_attr="v")
    return layers.mean(layers.square(out)), out


@pytest.mark.grid
def test_statistics_are_each_devices_own_and_the_scope_shows_the_firsts() -> None:
    feed = {"x": batch(8)["x"]}
    half, both = Trained(sgd, _normalized), Trained(sgd, _normalized)
    half.exe.run(half.main, {"x": feed["x"][:4]}, scope=half.scope)
    with devices(2):
        both.parallel().run([both.loss], feed)
    for name in ("mean", "spread"):
        np.testing.assert_allclose(both.scope[name], half.scope[name], err_msg=name, **CLOSE)


@pytest.mark.grid
def test_synchronized_statistics_are_those_of_all_rows() -> None:
    one, two = Trained(sgd, _normalized), Trained(sgd, _normalized)
    build = fluid.BuildStrategy()
    build.sync_batch_norm = True
    with devices(2):
        parallel = two.parallel(build_strategy=build)
    for step in range(2):
        feed = {"x": batch(8, step)["x"]}
        one.exe.run(one.main, feed, scope=one.scope)
        parallel.run([two.loss], feed)
    for name in ("mean", "spread", "w", "v"):
        found, wanted = two.scope[name], one.scope[name]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    with pytest.raises(FeedError, match="has different shapes on the devices"):
        parallel.run([two.loss], {"x": batch(5)["x"]})
