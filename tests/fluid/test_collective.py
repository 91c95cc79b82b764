"""Collective transpilers beyond the recorded cases: exactness, state of ranks, and mistakes."""

import socket
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ConnectError, FeedError, StrategyError
from jaxfleet.fluid import layers
from jaxfleet.fluid.transpiler import collective
from jaxfleet.fluid.transpiler.details.program_utils import wait_server_ready
from tests.fluid.nets import built, fresh

ENDPOINTS = "127.0.0.1:6170,127.0.0.1:6171"
FIRST, SECOND = ENDPOINTS.split(",")
# Few whole numbers, and a rate that is a power of two: nothing rounds, in any order.
X = np.arange(24, dtype=np.float32).reshape(8, 3) % 5 - 2
Y = np.arange(8, dtype=np.float32).reshape(8, 1) % 3
W = np.array([[1.0], [-2.0], [3.0]], np.float32)
FEED = {"x": X, "y": Y}


def line(transpiler: collective.Collective | None) -> fluid.Program:
    """Returns a line in training, by ranks if there is a transpiler."""
    with fresh() as (main, startup):
        x, y = fluid.data("x", [None, 3]), fluid.data("y", [None, 1])
        out = layers.fc(x, 1, param_attr="w", bias_attr=False)
        loss = layers.mean(layers.square_error_cost(out, y))
        fluid.optimizer.SGD(0.25).minimize(loss)
        if transpiler is not None:
            transpiler.transpile(startup, main, 0, ENDPOINTS, FIRST, wait_port=False)
    return main


def begun(**more: np.ndarray) -> fluid.Scope:
    scope = fluid.Scope()
    scope.update({"w": W, "w@SNAPSHOT": W, "learning_rate_0": np.full(1, 0.25, np.float32), **more})
    return scope


def trained(main: fluid.Program, scope: fluid.Scope, *steps: dict[str, np.ndarray]) -> np.ndarray:
    exe = fluid.Executor()
    for feed in steps:
        exe.run(main, feed, scope=scope)
    return np.asarray(scope["w"])


def halves(feed: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{name: value[at] for name, value in feed.items()} for at in (np.s_[:4], np.s_[4:])]


def test_ranks_that_sum_gradients_make_the_bits_of_one_device() -> None:
    wanted = trained(line(None), begun(), FEED, FEED)
    for transpiler in (collective.GradAllReduce(2), collective.SingleProcessMultiThread()):
        found = trained(line(transpiler), begun(), FEED, FEED)
        assert np.array_equal(found, wanted)


def test_ranks_that_train_by_themselves_make_the_bits_of_a_mean() -> None:
    one, two = (trained(line(None), begun(), half) for half in halves(FEED))
    assert not np.array_equal(one, two)
    found = trained(line(collective.LocalSGD(2)), begun(), FEED)
    assert np.array_equal(found, (one + two) / 2)


def test_ranks_meet_when_it_is_time() -> None:
    main, counter = line(collective.LocalSGD(1, k_steps=2)), "@LOCAL_SGD_STEPS@"
    scope = begun(**{counter: np.zeros(1, np.int32)})
    alone = line(None)
    ends = [trained(alone, begun(), half) for half in halves(FEED)]
    trained(main, scope, FEED)
    assert np.array_equal(of_ranks(scope, "w"), np.concatenate(ends))
    ends = [trained(alone, begun(), half, half) for half in halves(FEED)]
    trained(main, scope, FEED)
    assert np.array_equal(of_ranks(scope, "w"), np.concatenate([sum(ends) / 2] * 2))
    assert of_ranks(scope, counter).tolist() == [2, 2]


def of_ranks(scope: fluid.Scope, name: str) -> np.ndarray:
    """Returns the values of a variable on all ranks, concatenated."""
    found = scope.of_ranks(name)
    assert found is not None
    return np.asarray(found.whole)


@pytest.mark.parametrize("transpiler", [collective.GradAllReduce(2), collective.LocalSGD(1, 2)])
def test_a_startup_program_begins_all_ranks_as_the_first(transpiler: collective.Collective) -> None:
    main, startup = built("fc1", "sgd", part=100)
    transpiler.transpile(startup, main, 0, ENDPOINTS, FIRST, wait_port=False)
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    for name in ("fc_w", "out_w", "fc_b"):
        one, two = np.split(of_ranks(scope, name), 2)
        assert np.array_equal(one, two)
        assert np.array_equal(one, scope[name])
    assert np.ptp(np.asarray(scope["fc_w"])) > 0
    if isinstance(transpiler, collective.LocalSGD):
        assert np.array_equal(scope["fc_w@SNAPSHOT"], scope["fc_w"])
    feed = {"x": np.eye(10, dtype=np.float32), "y": np.ones((10, 1), np.float32)}
    losses = [exe.run(main, feed, ["mean_0.tmp_0"], scope=scope)[0] for _ in range(9)]
    assert losses[0].shape == (2,)
    assert losses[-1].max() < losses[0].min()


@pytest.mark.parametrize(("seed", "is_alike"), [(0, False), (7, True)])
def test_ranks_drop_out_each_its_own_unless_a_seed_is_given(seed: int, is_alike: bool) -> None:
    with fresh() as (main, startup):
        main.random_seed = seed
        out = layers.dropout(layers.fc(fluid.data("x", [None, 64]), 64, param_attr="w"), 0.5)
        fluid.optimizer.SGD(0.1).minimize(layers.mean(out))
        collective.GradAllReduce(1).transpile(startup, main, 0, ENDPOINTS, FIRST, wait_port=False)
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    (found,) = exe.run(main, {"x": np.ones((2, 64), np.float32)}, [out], scope=scope)
    assert np.array_equal(found[0] == 0, found[1] == 0) is is_alike


def test_each_rank_may_be_fed_by_itself_and_asked_by_itself() -> None:
    main = line(collective.GradAllReduce(1))
    scopes = begun(), begun()
    exe = fluid.Executor()
    (joined,) = exe.run(main, FEED, ["mean_0.tmp_0"], scope=scopes[0])
    (each,) = exe.run(main, halves(FEED), ["mean_0.tmp_0"], scope=scopes[1], return_merged=False)
    assert np.array_equal(joined, np.concatenate(each))
    assert np.array_equal(scopes[0]["w"], scopes[1]["w"])
    uneven = [{n: v[:2] for n, v in FEED.items()}, {n: v[2:] for n, v in FEED.items()}]
    (each,) = exe.run(main, uneven, ["x"], scope=scopes[1], return_merged=False)
    assert [len(rows) for rows in each] == [2, 6]
    slower = {**FEED, "w": W, "learning_rate_0": np.full(1, 0.125, np.float32)}
    exe.run(main, slower, scope=scopes[0])  # persistable values are common, not divided
    assert np.array_equal(2 * (scopes[0]["w"] - W), trained(line(None), begun(), FEED) - W)
    with pytest.raises(FeedError, match="3 feeds for 2 ranks"):
        exe.run(main, [FEED] * 3, scope=scopes[0])
    with pytest.raises(FeedError, match="'x' is fed 7 rows, which 2 ranks cannot share"):
        exe.run(main, {n: v[:7] for n, v in FEED.items()}, scope=scopes[0])
    with pytest.raises(FeedError, match=r"'y' .* is not fed"):
        exe.run(main, {"x": X}, scope=scopes[0])


def test_a_copy_for_tests_runs_on_ranks_and_changes_nothing() -> None:
    main = line(collective.LocalSGD(1))
    tested, scope = main.clone(for_test=True), begun()
    (found,) = fluid.Executor().run(tested, FEED, ["mean_0.tmp_0"], scope=scope)
    assert found.tolist() == [((X @ W - Y) ** 2)[at].mean() for at in (np.s_[:4], np.s_[4:])]
    assert np.array_equal(scope["w"], W)


def test_a_program_of_ranks_is_compiled_for_their_devices_only() -> None:
    main, exe = line(collective.GradAllReduce(1)), fluid.Executor()
    compiled = fluid.CompiledProgram(main)
    assert exe.run(compiled, FEED, ["mean_0.tmp_0"], scope=begun())[0].shape == (2,)
    two = fluid.cpu_places(2)
    parallel = fluid.CompiledProgram(main).with_data_parallel("mean_0.tmp_0", places=two)
    with pytest.raises(StrategyError, match="a rank's program is compiled for 2 devices"):
        exe.run(parallel, FEED, scope=begun())


def test_a_script_says_how_ranks_train_by_a_name_a_class_or_an_instance() -> None:
    texts = []
    for mode in ("local_sgd", collective.LocalSGD, collective.LocalSGD(1)):
        with fresh() as (main, startup):
            fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.fc(fluid.data("x", [None, 3]), 1)))
            made = fluid.DistributeTranspiler()
            made._transpile_collective(mode, 1, ENDPOINTS, SECOND, startup, main, wait_port=False)
        assert main._facts == {"role": "collective", "nranks": 2, "rank": 1}
        texts.append(f"{main}{startup}")
    assert len(set(texts)) == 1


def test_dumps_show_what_each_pass_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXFLEET_DUMP_DIR", str(tmp_path))
    transpile(mode="local_sgd")
    found = {path.stem for path in tmp_path.rglob("*.diff")}
    passes = ("comm_init", "broadcast_params", "snapshot_params", "local_sgd")
    assert {name.partition("_")[2] for name in found} == set(passes)


def transpile(trainers: Any = ENDPOINTS, *, mode: Any = "grad_allreduce", **given: Any) -> None:
    config = fluid.DistributeTranspilerConfig()
    config.mode, config.collective_mode, config.wait_port = "collective", mode, False
    given = {"trainer_id": 0, "current_endpoint": FIRST, **given}
    with fresh():
        fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.fc(fluid.data("x", [None, 3]), 1)))
        fluid.DistributeTranspiler(config).transpile(trainers=trainers, **given)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"trainers": 2}, "trainers is 2"),
        ({"trainers": 2, "mode": "local_sgd"}, "trainers is 2"),
        ({"trainers": 2, "mode": "single_process_multi_thread"}, "trainers is 2"),
        ({"trainers": FIRST}, f"there is one rank, {FIRST}"),
        ({"mode": "foo"}, "config.collective_mode is 'foo'"),
        ({"mode": None}, "config.collective_mode is None"),
        ({"trainer_id": -1}, "the rank is -1"),
        ({"trainer_id": 2}, "rank 2 of 2"),
        ({"current_endpoint": "c:1"}, "current_endpoint is c:1"),
        ({"trainers": f"{FIRST},here"}, "'here' is no endpoint"),
        ({"trainers": [FIRST, FIRST]}, f"two ranks have the endpoint {FIRST}"),
    ],
)
def test_what_collective_mode_refuses(given: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        transpile(**given)
    assert "fluid.DistributeTranspiler(config).transpile(" in "".join(caught.value.__notes__)


def test_a_program_is_transpiled_once_and_a_refusal_leaves_it_as_it_was() -> None:
    main, startup = built("fc1", "sgd", part=100)
    before = f"{main}{startup}"
    with pytest.raises(ValueError, match=f"there is one rank, {FIRST}"):
        collective.GradAllReduce().transpile(startup, main, 0, FIRST, FIRST, wait_port=False)
    with pytest.raises(ValueError, match="no operator updates a parameter"):
        collective.LocalSGD().transpile(main, startup, 0, ENDPOINTS, FIRST, wait_port=False)
    assert f"{main}{startup}" == before
    collective.GradAllReduce().transpile(startup, main, 0, ENDPOINTS, FIRST, wait_port=False)
    with pytest.raises(ValueError, match="already rewritten"):
        collective.LocalSGD().transpile(startup, main, 0, ENDPOINTS, FIRST, wait_port=False)


def test_more_ranks_than_devices_are_refused() -> None:
    main, startup = built("fc1", "sgd", part=100)
    endpoints = [f"127.0.0.1:{port}" for port in range(6170, 6179)]
    transpiler = collective.GradAllReduce(1)
    transpiler.transpile(startup, main, 3, endpoints, endpoints[3], wait_port=False)
    with pytest.raises(StrategyError, match="rank 3 of 9, and this process has 8 devices"):
        fluid.Executor().run(startup)


def test_a_startup_program_of_another_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", ENDPOINTS)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    for mode, fetch in (("nccl2", None), ("nccl2", []), ("collective", [])):
        with fresh() as (_, startup):
            fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.fc(fluid.data("x", [None, 3]), 1)))
            config = fluid.DistributeTranspilerConfig()
            config.mode, config.collective_mode = mode, "grad_allreduce"
            made = fluid.DistributeTranspiler(config)
            made.transpile(0, trainers=ENDPOINTS, current_endpoint=FIRST)
        with pytest.raises(StrategyError, match="rank 0 of 2, and this process is rank 1 of 2"):
            fluid.Executor().run(startup, fetch_list=fetch, scope=fluid.Scope())


def test_an_nccl2_startup_program_runs_where_there_is_no_nccl() -> None:
    with fresh() as (_, startup):
        fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.fc(fluid.data("x", [None, 3]), 1)))
        config = fluid.DistributeTranspilerConfig()
        config.mode, config.nccl_comm_num = "nccl2", 2
        made = fluid.DistributeTranspiler(config)
        made.transpile(1, trainers=ENDPOINTS, current_endpoint=SECOND)  # the second does not wait
    scope = fluid.Scope()
    jax.devices()  # from here on a process cannot join
    fluid.Executor().run(startup, scope=scope)
    assert {"NCCLID", "fc_0.w_0", "learning_rate_0"} <= {*scope}
    with pytest.raises(ValueError, match="knows its trainers already"):
        made._transpile_nccl2(1, ENDPOINTS, SECOND, startup, wait_port=False)


def test_waiting_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = f"127.0.0.1:{listener.getsockname()[1]}"
        wait_server_ready([there])
    with pytest.raises(ConnectError, match=f"nothing listens at {there} after 0 s"):
        wait_server_ready([there], 0)


def test_a_program_without_gradients_is_left_as_it_is_with_a_warning() -> None:
    with fresh() as (main, startup):
        fluid.layers.fc(fluid.data("x", [None, 2]), 1)
        before = [op.type for op in main.global_block().ops]
        transpiler = fluid.transpiler.collective.GradAllReduce(1)
        endpoints = ["127.0.0.1:6170", "127.0.0.1:6171"]
        with pytest.warns(UserWarning, match="GradAllReduce sums nothing"):
            transpiler.transpile(startup, main, 0, endpoints, endpoints[0], False)
    assert [op.type for op in main.global_block().ops] == before
    assert any(op.type == "c_comm_init" for op in startup.global_block().ops)
