"""The collective fleet: its programs, its rejections, and training."""

import copy
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.base.role_maker import UserDefinedCollectiveRoleMaker
from jaxfleet.fluid.incubate.fleet.collective import (
    Collective,
    CollectiveOptimizer,
    DistFCConfig,
    DistributedStrategy,
    collective_fleet,
)
from tests.fluid.nets import fresh

TWO = ["127.0.0.1:6170", "127.0.0.1:6171"]
APART = ["10.0.0.1:6170", "10.0.0.2:6170", "10.0.0.1:6171", "10.0.0.2:6171"]
ROWS = 8
AGAIN = {"forward_recompute": True, "recompute_checkpoints": ["fc_0.tmp_1"]}


def net() -> fluid.Variable:
    x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 1])
    out = fluid.layers.fc(x, 1, param_attr="w", bias_attr="b")
    return fluid.layers.mean(fluid.layers.square_error_cost(out, y))


def fleet_of(endpoints: list[str], number: int = 0) -> Collective:
    fleet = Collective()
    fleet.init(UserDefinedCollectiveRoleMaker(number, endpoints))
    return fleet


def strategy_with(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


def minimized(fleet: Collective, optimizer: Any = None, **fields: Any) -> fluid.Variable:
    with fresh() as (main, startup):
        main.random_seed = startup.random_seed = 5
        loss = net()
        used = fluid.optimizer.SGD(0.1) if optimizer is None else optimizer
        fleet.distributed_optimizer(used, strategy_with(**fields)).minimize(loss, startup)
    return loss


def batches() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    xs = random.normal(size=(3, ROWS, 4)).astype(np.float32)
    return [{"x": x, "y": x[:, :1] + 1} for x in xs]


def trained(startup: fluid.Program, main: Any, loss: fluid.Variable) -> tuple[list[float], Any]:
    """Returns the losses, as the mean over devices, and the last weights."""
    exe, scope = fluid.Executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    losses = [
        float(np.mean(exe.run(main, feed=fed, fetch_list=[loss], scope=scope)[0]))
        for fed in batches()
    ]
    return losses, np.array(scope["w"])


def alone() -> tuple[list[float], Any]:
    with fresh() as (main, startup):
        main.random_seed = startup.random_seed = 5
        loss = net()
        fluid.optimizer.SGD(0.1).minimize(loss)
    return trained(startup, main, loss)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("endpoints", "fields"),
    [
        (TWO, {"mode": "collective", "collective_mode": "grad_allreduce"}),
        (TWO, {"use_local_sgd": True}),  # at every step, with SGD: equals the sum of gradients
        (TWO, {"_ut4grad_allreduce": True}),
        (TWO[:1], {}),
        (TWO[:1], {"use_local_sgd": True}),
        (TWO, {"_ut4grad_allreduce": True, **AGAIN}),
        (TWO[:1], AGAIN),
    ],
    ids=[
        "grad_allreduce",
        "local_sgd",
        "ut4",
        "one_worker",
        "one_worker_local_sgd",
        "recompute",
        "one_worker_recompute",
    ],
)
def test_ranks_train_as_one_device(
    endpoints: list[str], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    fleet = fleet_of(endpoints)
    loss = minimized(fleet, **fields)
    losses, weights = trained(fleet.startup_program, fleet.main_program, loss)
    wanted, wanted_weights = alone()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(weights, wanted_weights, rtol=1e-5)


def test_nccl2_tells_the_compiled_program_who_trains() -> None:
    fleet = fleet_of(APART, 1)
    minimized(fleet, nccl_comm_num=2, use_hierarchical_allreduce=False)
    assert isinstance(fleet.main_program, fluid.CompiledProgram)
    build = fleet.main_program._build_strategy
    assert build is not None
    assert (build.num_trainers, build.trainer_id) == (4, 1)
    assert build.trainers_endpoints == APART
    assert build.nccl_comm_num == 2
    types = [op.type for op in fleet.startup_program.global_block().ops]
    assert types[-1] == "gen_nccl_id"
    assert fleet.main_program.program._trainers_endpoints == APART
    assert fleet._origin_program is not None


def test_what_a_strategy_is_at_first_and_which_fields_do_nothing() -> None:
    strategy = DistributedStrategy()
    found = {name: getattr(strategy, name) for name in strategy._defaults}
    assert found.pop("exec_strategy").num_threads == 0
    assert found == {
        **fluid.BuildStrategy._defaults,
        "use_local_sgd": False, "use_dist_fc": False, "dist_fc_config": None, "mode": "nccl2",
        "collective_mode": None, "nccl_comm_num": 1, "forward_recompute": False,
        "recompute_checkpoints": [], "use_amp": False, "amp_loss_scaling": 32768,
        "_ut4grad_allreduce": False,
    }  # fmt: skip
    quiet = set(strategy.no_ops()) - set(fluid.BuildStrategy.no_ops())
    assert not quiet
    assert strategy.recompute_checkpoints is not DistributedStrategy().recompute_checkpoints


def test_streams_of_sums_follow_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = strategy_with(nccl_comm_num=2, use_hierarchical_allreduce=True,
                          hierarchical_allreduce_inter_nranks=2)  # fmt: skip

    def threads(endpoints: list[str], strategy: DistributedStrategy) -> tuple[int, int, bool]:
        optimizer = CollectiveOptimizer(fluid.optimizer.SGD(0.1), strategy, fleet_of(endpoints))
        optimizer._set_streams(optimizer._strategy, optimizer._strategy.exec_strategy)
        made = optimizer._strategy
        levels = made.use_hierarchical_allreduce
        return made.nccl_comm_num, made.exec_strategy.num_threads, levels

    with pytest.warns(UserWarning, match="num_threads is 5"):
        assert threads(APART, asked) == (2, 5, True)
    with pytest.warns(UserWarning, match="since you only have 1 node"):
        assert threads(TWO, asked) == (1, 2, False)
    normed = copy.deepcopy(asked)
    normed.sync_batch_norm = True
    with pytest.warns(UserWarning, match="since sync_batch_norm"):
        assert threads(APART, normed) == (1, 1, False)
    monkeypatch.setenv("FLAGS_sync_nccl_allreduce", "0")
    assert threads(APART, asked) == (2, 0, True)
    optimizer = CollectiveOptimizer(fluid.optimizer.SGD(0.1), None, fleet_of(APART))
    assert optimizer._get_node_ips_from_endpoints(APART) == ["10.0.0.1", "10.0.0.2"]
    assert optimizer._node_num() == 2


class RecomputeOptimizer(fluid.optimizer.SGD):
    """An optimizer with that name, as scripts may bring."""


class OptimizerWithMixedPrecision(fluid.optimizer.SGD):
    """Likewise."""


def test_optimizers_that_contradict_the_strategy_are_refused() -> None:
    sgd = fluid.optimizer.SGD(0.1)
    CollectiveOptimizer(sgd, None)
    with pytest.raises(ValueError, match="recompute_checkpoints should be a List"):
        CollectiveOptimizer(sgd, strategy_with(recompute_checkpoints="fc"))
    with pytest.raises(ValueError, match=r"please set strategy\.recompute_checkpoints"):
        minimized(fleet_of(TWO), forward_recompute=True)
    twice = {"forward_recompute": True, "recompute_checkpoints": ["fc"]}
    with pytest.raises(ValueError, match="can not use RecomputeOptimizer when you set"):
        minimized(fleet_of(TWO), RecomputeOptimizer(0.1), **twice)
    with pytest.raises(ValueError, match=r"DistStrategy\.use_amp as True"):
        minimized(fleet_of(TWO), OptimizerWithMixedPrecision(0.1), use_amp=True)


@pytest.mark.parametrize(
    ("optimizer", "fields", "what"),
    [
        ("Lamb", {"use_local_sgd": True}, "can't use use_local_sgd and use_lamb together"),
        ("Lamb", {"_ut4grad_allreduce": True}, "_ut4grad_allreduce and use_lamb together"),
        ("Lamb", {"use_dist_fc": True}, "use_dist_fc and use_lamb together"),
        ("SGD", {"use_local_sgd": True, "use_dist_fc": True}, "use_local_sgd and use_dist_fc"),
        ("SGD", {"use_dist_fc": True}, "dist_fc_config should be set"),
        ("SGD", {"collective_mode": "local_sgd"}, "can be used under collective mode"),
        ("SGD", {"collective_mode": "grad_allreduce"}, "can be used under collective mode"),
    ],
)
def test_fields_that_exclude_each_other(optimizer: str, fields: Any, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        minimized(fleet_of(TWO), getattr(fluid.optimizer, optimizer)(0.1), **fields)


def test_what_is_not_done_is_refused_or_said() -> None:
    with pytest.raises(NotImplementedError, match="classes over ranks"):
        minimized(fleet_of(TWO), use_dist_fc=True, dist_fc_config=DistFCConfig())
    with pytest.raises(ValueError, match="'fc' is to be kept for backward"):
        minimized(fleet_of(TWO), forward_recompute=True, recompute_checkpoints=["fc"])
    with pytest.raises(ValueError, match="mode"):
        strategy_with(mode="pserver")


def test_a_scripts_strategy_stays_as_it_is() -> None:
    strategy = strategy_with(use_local_sgd=True)
    fleet = fleet_of(TWO)
    with fresh() as (_, startup):
        loss = net()
        sgd = fluid.optimizer.SGD(0.1)
        fleet.distributed_optimizer(sgd, strategy).minimize(loss, startup)
    assert (strategy.mode, strategy.collective_mode) == ("nccl2", None)
    assert strategy.exec_strategy.num_threads == 0


def test_an_optimizer_made_by_hand_is_of_the_modules_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fleet_of(TWO)
    monkeypatch.setattr(collective_fleet, "fleet", own)
    with fresh():
        CollectiveOptimizer(fluid.optimizer.SGD(0.1)).minimize(net())
    assert isinstance(own.main_program, fluid.CompiledProgram)
    assert own.startup_program is not None


def test_who_has_no_fleet_and_what_no_fleet_does() -> None:
    with pytest.raises(ValueError, match=r"use fleet.init\(role\)"):
        Collective().distributed_optimizer(fluid.optimizer.SGD(0.1))
    with pytest.raises(ValueError, match="optimizer must be an instance of Optimizer"):
        fleet_of(TWO).distributed_optimizer("Adam")
    with pytest.raises(TypeError, match="a strategy is of type"):
        fleet_of(TWO).distributed_optimizer(
            fluid.optimizer.SGD(0.1),
            "strategy",  # type: ignore[arg-type]  # the tested mistake
        )
    with fresh(), pytest.raises(ValueError, match="the role of this process is not set"):
        CollectiveOptimizer(fluid.optimizer.SGD(0.1)).minimize(net())
    fleet = fleet_of(TWO)
    for name in ("init_worker", "run_worker", "init_server", "run_server", "stop_worker"):
        with pytest.warns(UserWarning, match=f"You should not call '{name}' method"):
            getattr(fleet, name)()
    with pytest.raises(AssertionError, match="main_program must be as Program type"):
        fleet.save_persistables(fluid.Executor(), "nowhere")


def test_a_list_of_losses_is_trained_by_their_sum() -> None:
    weights = []
    for is_list in (True, False):
        fleet = fleet_of(TWO[:1])
        with fresh() as (main, startup):
            main.random_seed = startup.random_seed = 5
            first = net()
            out = main.global_block().var("fc_0.tmp_1")
            second = fluid.layers.mean(out * out)
            losses: Any = [first, second] if is_list else fluid.layers.sums([first, second])
            fleet.distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(losses, startup)
        weights.append(trained(fleet.startup_program, fleet.main_program, first)[1])
    np.testing.assert_array_equal(weights[0], weights[1])


def test_losses_of_several_programs_are_refused() -> None:
    fleet = fleet_of(TWO[:1])
    with fresh():
        first = net()
    with fresh():
        second = net()
        optimizer = fleet.distributed_optimizer(fluid.optimizer.SGD(0.1))
        with pytest.raises(ValueError, match="2 losses of 2 programs"):
            optimizer.minimize([first, second])
        with pytest.raises(TypeError, match="a loss is of type int"):
            optimizer.minimize([1])  # type: ignore[list-item]
