"""The fleet of jobs with servers: its role, its programs, its rejections."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.base.role_maker import Role, UserDefinedRoleMaker
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler import (
    DistributedTranspiler,
    TranspilerOptimizer,
)
from tests.fluid.nets import fresh

SERVERS = ["127.0.0.1:6174", "127.0.0.1:6175"]


def net() -> fluid.Variable:
    x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 1])
    return fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))


def fleet_of(number: int = 0, role: Role = Role.WORKER, workers: int = 2) -> DistributedTranspiler:
    fleet = DistributedTranspiler()
    fleet.init(UserDefinedRoleMaker(number, role, workers, SERVERS))
    return fleet


def no_wait() -> fluid.DistributeTranspilerConfig:
    config = fluid.DistributeTranspilerConfig()
    config.wait_port = False
    return config


def made(fleet: DistributedTranspiler, config: fluid.DistributeTranspilerConfig) -> None:
    with fresh() as (_, startup):
        loss = net()
        fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), config).minimize(
            loss, startup_program=startup
        )


def test_who_it_is_is_what_the_role_maker_says() -> None:
    fleet = fleet_of(1)
    assert (fleet.is_worker(), fleet.is_server(), fleet.is_first_worker()) == (True, False, False)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (1, 2, 2)
    assert fleet.server_endpoints() == SERVERS
    assert fleet.server_endpoints(to_string=True) == ",".join(SERVERS)
    assert fleet.worker_endpoints() == []
    assert fleet_of(1, Role.SERVER).server_index() == 1


def test_who_gives_no_role_maker_trains_alone_or_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = DistributedTranspiler()
    fleet.init()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (0, 1, 0)
    fleet.barrier_worker()
    total = np.zeros(2)
    fleet.all_reduce_worker(np.ones(2), total)
    assert total.tolist() == [1.0, 1.0]
    for name, value in {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "3",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(SERVERS),
    }.items():
        monkeypatch.setenv(name, value)
    fleet.init()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (1, 3, 2)


def test_files_are_shared_out_in_blocks() -> None:
    files = ["a", "b", "c", "d", "e"]
    assert [fleet_of(n).split_files(files) for n in range(2)] == [["a", "b", "c"], ["d", "e"]]
    found = [fleet_of(n, workers=3).split_files(["a", "b"]) for n in range(3)]
    assert found == [["a"], ["b"], []]
    with pytest.raises(TypeError, match="files should be a list of file need to be read"):
        fleet_of().split_files("abc")  # the tested call


def test_geo_makes_a_servers_programs() -> None:
    config = no_wait()
    config.sync_mode, config.geo_sgd_mode, config.geo_sgd_need_push_nums = False, True, 5
    fleet = fleet_of(0, Role.SERVER)
    made(fleet, config)
    assert [op.type for op in fleet.main_program.global_block().ops] == ["listen_and_serv"]
    assert fleet.main_program.global_block().ops[0].attr("distributed_mode") == 3
    assert fleet.startup_program.global_block().ops


def test_a_server_with_a_higher_number_than_all_workers_has_its_programs() -> None:
    fleet = fleet_of(1, Role.SERVER, workers=1)
    made(fleet, no_wait())
    assert fleet.main_program.global_block().ops[0].attr("endpoint") == SERVERS[1]


def test_an_optimizer_is_not_distributed_before_init() -> None:
    optimizer = fluid.optimizer.SGD(0.1)
    with pytest.raises(ValueError, match=r"use fleet.init\(role\) to initialize the role of"):
        DistributedTranspiler().distributed_optimizer(optimizer)
    with pytest.raises(ValueError, match="the role of this process is not set"):
        DistributedTranspiler().worker_num()
    with pytest.raises(TypeError, match="role_maker must be an instance of RoleMakerBase"):
        DistributedTranspiler().init("worker")  # type: ignore[arg-type]  # the tested mistake


def test_executors_and_programs_that_cannot_save_are_refused(tmp_path: Path) -> None:
    fleet, exe = fleet_of(), fluid.Executor()
    with fresh() as (main, startup):
        loss = net()
    exe.run(startup)
    parallel = fluid.ParallelExecutor(use_cuda=False, main_program=main)
    compiled = fluid.CompiledProgram(main)
    refused: list[tuple[Any, Any]] = [(parallel, None), ("executor", None), (exe, compiled)]
    for executor, program in refused:
        with pytest.raises(TypeError, match=r"executor|main_program"):
            fleet.save_inference_model(executor, str(tmp_path), ["x"], [loss], program)
        with pytest.raises(TypeError, match=r"executor|main_program"):
            fleet.save_persistables(executor, str(tmp_path), program)
    with pytest.raises(TypeError, match="strategy must be an instance of"):
        fleet._transpile("config")
    with pytest.raises(ValueError, match="main_program is for local"):
        fleet.save_persistables(exe, str(tmp_path), main)
    with pytest.raises(ValueError, match="main_program is None"):
        fleet.save_persistables(exe, str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_wrong_optimizers_strategies_and_losses_are_refused() -> None:
    adam = fluid.optimizer.Adam(0.001)
    with pytest.raises(ValueError, match="optimizer must be an instance of Optimizer"):
        TranspilerOptimizer("Adam")
    with pytest.raises(ValueError, match="optimizer must be an instance of Optimizer"):
        fleet_of().distributed_optimizer("Adam")
    with pytest.raises(TypeError, match="strategy must be an instance of"):
        TranspilerOptimizer(adam, "strategy")  # type: ignore[arg-type]  # the tested mistake
    with pytest.raises(TypeError, match="can not accept loss with list"):
        TranspilerOptimizer(adam).minimize([])  # type: ignore[arg-type]  # as that
    with fresh():
        loss = net()
        with pytest.raises(TypeError, match="can not accept program with list"):
            TranspilerOptimizer(adam).minimize(loss, startup_program=[])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="this optimizer belongs to no fleet"):
            TranspilerOptimizer(adam).minimize(loss)
        optimizer = TranspilerOptimizer(adam)
        pairs = optimizer.backward(loss)
        assert [op.type for op in optimizer.apply_gradients(pairs)][:2] == ["adam", "adam"]


def test_nothing_runs_before_minimize(tmp_path: Path) -> None:
    fleet = fleet_of(0, Role.SERVER)
    with pytest.raises(ValueError, match="startup_program is None, need invoke"):
        fleet.init_server()
    with pytest.raises(ValueError, match="main_program is None, need invoke"):
        fleet.run_server()
    with pytest.raises(ValueError, match="main_program is None, need invoke"):
        fleet_of().init_worker()
    made(fleet, no_wait())
    with pytest.raises(ValueError, match="this process is a server, and trains nothing"):
        fleet.init_worker()
    worker = fleet_of()
    made(worker, no_wait())
    for call in (worker.init_server, worker.run_server):
        with pytest.raises(ValueError, match="this process is a worker, and serves nothing"):
            call()
    absent = str(tmp_path / "absent")
    with (
        fluid.scope_guard(fluid.Scope()),
        pytest.raises(ValueError, match=f"There is no directory named '{absent}'"),
    ):
        fleet.init_server(absent)


def test_a_worker_says_what_its_communicator_is_set_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = fleet_of()
    made(fleet, no_wait())
    fleet.init_worker()
    assert "communicator_send_queue_size" in capsys.readouterr().out
    assert fleet._communicator is not None
    assert fleet._communicator.is_running()
    fleet.stop_worker()
    fleet.stop_worker()
    assert not fleet._communicator.is_running()
