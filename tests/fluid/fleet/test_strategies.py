"""Strategies of the fleet on the transpiler: their values and their checks."""

from collections.abc import Mapping
from typing import Any

import pytest

from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler import (
    distributed_strategy as strategies,
)
from jaxfleet.fluid.transpiler import ServerRuntimeConfig

Factory = strategies.StrategyFactory


@pytest.fixture
def _two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")


@pytest.mark.usefixtures("_two")
def test_the_sync_strategy_copies_settings_and_caps_queues_at_the_devices() -> None:
    strategy = Factory.create_sync_strategy()
    config = strategy.get_program_config()
    assert (config.sync_mode, config.runtime_split_send_recv) == (False, True)
    assert strategy.get_build_strategy().async_mode
    assert strategy.get_execute_strategy().num_threads == 2
    wider = fluid.DistributeTranspilerConfig()
    wider.min_block_size = 81920
    strategy.set_program_config(wider)
    assert strategy.get_program_config().min_block_size == 81920
    assert wider.sync_mode, "the script's own is copied"
    strategy.set_program_config({"min_block_size": 8192})
    assert strategy.get_program_config().min_block_size == 8192
    assert strategy.get_program_config().completely_not_async
    with pytest.warns(UserWarning, match="communicator_send_queue_size has no effect here"):
        strategy.set_trainer_runtime_config({"communicator_send_queue_size": "50"})
    with pytest.warns(UserWarning, match="communicator_send_queue_size is 2"):
        flags = strategy.get_trainer_runtime_config().get_communicator_flags()
    assert flags["communicator_send_queue_size"] == "2"
    assert "communicator_independent_recv_thread" not in flags


SETTERS = {
    "program_config": ("DistributeTranspilerConfig", "set_program_config"),
    "trainer": ("TrainerRuntimeConfig", "set_trainer_runtime_config"),
    "server": ("ServerRuntimeConfig", "set_server_runtime_config"),
    "execute": ("ExecutionStrategy", "set_execute_strategy"),
    "build": ("BuildStrategy", "set_build_strategy"),
}


@pytest.mark.parametrize("what", SETTERS)
def test_unknown_keys_and_other_types_are_refused(what: str) -> None:
    kind, name = SETTERS[what]
    change = getattr(Factory.create_sync_strategy(), name)
    with pytest.raises(ValueError, match=f"{kind} doesn't have key: unknown"):
        change({"unknown": 1})
    with pytest.raises(TypeError, match=f"{kind} only accept input type: dict or {kind}"):
        change(None)


def test_the_geo_strategy_carries_its_push_numbers() -> None:
    strategy = Factory.create_geo_strategy(5)
    config = strategy.get_program_config()
    assert (config.geo_sgd_mode, config.geo_sgd_need_push_nums) == (True, 5)
    build = fluid.BuildStrategy()
    build.memory_optimize = False
    strategy.set_build_strategy(build)
    assert strategy.get_build_strategy().memory_optimize is False
    with pytest.warns(UserWarning, match="memory_optimize has no effect here"):
        strategy.set_build_strategy({"memory_optimize": True})
    assert strategy.get_build_strategy().memory_optimize is True
    assert strategy.get_build_strategy().async_mode
    flags = strategy.get_trainer_runtime_config().get_communicator_flags()
    assert set(flags) == {"communicator_thread_pool_size", "communicator_send_wait_times"}


def test_the_half_async_strategy_takes_server_and_trainer_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CPU_NUM", "100")
    strategy = Factory.create_half_async_strategy()
    threads = ServerRuntimeConfig()
    threads._rpc_send_thread_num = 24
    strategy.set_server_runtime_config(threads)
    assert strategy.get_server_runtime_config()._rpc_send_thread_num == 24
    strategy.set_server_runtime_config({"_rpc_send_thread_num": 20})
    assert strategy.get_server_runtime_config()._rpc_send_thread_num == 20
    mine = strategies.TrainerRuntimeConfig()
    with pytest.warns(UserWarning, match="communicator_send_queue_size has no effect here"):
        mine.set("communicator_send_queue_size", 50)
    strategy.set_trainer_runtime_config(mine)
    with pytest.warns(UserWarning, match="communicator_send_queue_size is 100"):
        flags = strategy.get_trainer_runtime_config().get_communicator_flags()
    assert flags["communicator_send_queue_size"] == "100"


def test_the_async_strategy_takes_all_settings_as_they_are() -> None:
    strategy = Factory.create_async_strategy()
    with pytest.warns(UserWarning, match="communicator_send_queue_size has no effect here"):
        strategy.set_trainer_runtime_config({"communicator_send_queue_size": 50})
    flags = strategy.get_trainer_runtime_config().get_communicator_flags()
    assert flags["communicator_send_queue_size"] == "50"
    assert flags["communicator_independent_recv_thread"] == "1"
    assert "rpc_deadline" not in flags


@pytest.mark.parametrize(
    "check",
    [
        *("check_program_config", "check_trainer_runtime_config", "check_server_runtime_config"),
        *("check_execute_strategy", "check_build_strategy"),
    ],
)
def test_the_base_of_strategies_says_nothing_of_a_mode(check: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{check} must be implemented by derived class"):
        getattr(strategies.DistributedStrategy(), check)()


CONFIGS: Mapping[str, tuple[Mapping[str, Any], type]] = {
    "sync": ({}, strategies.SyncStrategy),
    "half_async_for_whole_gradients": ({"sync_mode": False}, strategies.HalfAsyncStrategy),
    "async": (
        {"sync_mode": False, "runtime_split_send_recv": True},
        strategies.AsyncStrategy,
    ),
    "half_async": (
        {"sync_mode": False, "runtime_split_send_recv": True, "half_async": True},
        strategies.HalfAsyncStrategy,
    ),
    "geo": (
        {"sync_mode": False, "runtime_split_send_recv": True, "geo_sgd_mode": True},
        strategies.GeoStrategy,
    ),
    "geo_without_split": ({"sync_mode": False, "geo_sgd_mode": True}, strategies.GeoStrategy),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_transpilers_config_asks_for_a_strategy_and_stays_as_it_is(name: str) -> None:
    fields, wanted = CONFIGS[name]
    config = fluid.DistributeTranspilerConfig()
    for field, value in {**fields, "geo_sgd_need_push_nums": 7, "min_block_size": 9000}.items():
        setattr(config, field, value)
    before = dict(vars(config))
    made = strategies.strategy_of(config)
    assert type(made) is wanted
    assert vars(config) == before
    got = made.get_program_config()
    assert (got.min_block_size, got.geo_sgd_need_push_nums) == (9000, 7)
    assert (got.sync_mode, got.runtime_split_send_recv) == (False, True)


def test_what_is_to_be_dumped_is_given_back_filled_up() -> None:
    strategy = Factory.create_async_strategy()
    assert strategy.get_debug_opt() == {}
    with pytest.warns(UserWarning, match="set_debug_opt has no effect here: nothing is dumped"):
        strategy.set_debug_opt({"dump_slot": 1, "dump_fields": ("fc",)})
    assert strategy.get_debug_opt() == {
        "dump_slot": True, "dump_converter": "", "dump_fields": ["fc"], "dump_file_num": 16,
        "dump_fields_path": "", "dump_param": [],
    }  # fmt: skip


def test_a_config_is_displayed(capsys: pytest.CaptureFixture[str]) -> None:
    config = strategies.TrainerRuntimeConfig()
    with pytest.raises(ValueError, match="no mode"):
        config.get_communicator_flags()
    config.display({"communicator_thread_pool_size": "5"})
    assert "communicator_thread_pool_size  5" in capsys.readouterr().out
