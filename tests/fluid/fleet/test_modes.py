"""The fleet's modes over a network in memory: one worker trains as a lone executor does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.base.role_maker import Role, UserDefinedRoleMaker
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler import (
    DistributedTranspiler,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import (  # noqa: E501
    StrategyFactory,
)
from tests.fluid.fleet import script
from tests.fluid.nets import fresh
from tests.fluid.pserver.memory import Job

SERVERS = ["127.0.0.1:7601", "127.0.0.1:7602"]
STEPS = 4
STRATEGIES: dict[str, Callable[[], Any]] = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half_async": StrategyFactory.create_half_async_strategy,
    "geo": lambda: StrategyFactory.create_geo_strategy(2),
}


class Process:
    """A process of a job."""

    def __init__(self, job: Job, number: int, role: Role, strategy: Any) -> None:
        strategy.set_program_config({"wait_port": False})
        self.fleet = DistributedTranspiler()
        self.fleet.init(UserDefinedRoleMaker(number, role, 1, SERVERS))
        connections = job.connections()
        self.fleet.executor._pserver.connections = connections
        with fresh() as (main, startup):
            main.random_seed = startup.random_seed = 3
            self.loss, self.predicted = script.net()
            sgd = fluid.optimizer.SGD(0.05)
            self.fleet.distributed_optimizer(sgd, strategy).minimize(self.loss, None, startup)
        self.exe = fluid.Executor()
        self.exe._pserver.connections = connections
        self.number = number

    def serve(self) -> None:
        """Runs a server. All share the global scope, with distinct names."""
        self.fleet.init_server()
        self.fleet.run_server()

    def work(self, folder: Path) -> tuple[list[float], Any]:
        """Runs the worker; returns its losses, and the prediction of its saved model."""
        self.fleet.init_worker()
        self.exe.run(self.fleet.startup_program)
        losses = []
        for step in range(STEPS):
            fed = script.batch(step)
            losses.append(self.exe.run(self.fleet.main_program, fed, [self.loss])[0].item())
        self.fleet.save_inference_model(self.exe, str(folder), ["x"], [self.predicted])
        self.fleet.stop_worker()
        return losses, predicted(folder)


def predicted(folder: Path) -> Any:
    """Returns the prediction of a saved model for a batch."""
    exe = fluid.Executor()
    with fluid.scope_guard(fluid.Scope()):
        program, fed, fetch = fluid.io.load_inference_model(str(folder), exe)
        return exe.run(program, feed={fed[0]: script.batch(9)["x"]}, fetch_list=fetch)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Any]:
    """Returns the losses of a fleet without servers, and the prediction of its saved model."""
    folder, fleet, exe = tmp_path_factory.mktemp("alone"), DistributedTranspiler(), fluid.Executor()
    fleet.init()
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        main.random_seed = startup.random_seed = 3
        loss, out = script.net()
        fleet.distributed_optimizer(fluid.optimizer.SGD(0.05)).minimize(loss, None, startup)
        fleet.init_worker()
        exe.run(fleet.startup_program)
        losses = [
            exe.run(fleet.main_program, script.batch(step), [loss])[0].item()
            for step in range(STEPS)
        ]
        fleet.save_inference_model(exe, str(folder / "model"), ["x"], [out])
        fleet.save_persistables(exe, str(folder / "kept"))
        assert (folder / "kept" / "w1").exists()
        fleet.stop_worker()
    return losses, predicted(folder / "model")


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", STRATEGIES)
def test_one_worker_trains_as_alone(
    mode: str, alone: tuple[list[float], Any], tmp_path: Path
) -> None:
    job, made = Job(), STRATEGIES[mode]
    with fluid.scope_guard(fluid.Scope()):
        servers = [Process(job, n, Role.SERVER, made()) for n in range(2)]
        worker = Process(job, 0, Role.WORKER, made())
        people: dict[str, Any] = {f"server {s.number}": s.serve for s in servers}
        done = job.run({**people, "worker": lambda: worker.work(tmp_path)})
    losses, found = done["worker"]
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    np.testing.assert_allclose(found, alone[1], rtol=1e-4, atol=1e-5)


def test_workers_without_servers_are_refused() -> None:
    fleet = DistributedTranspiler()
    fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 2, ["a:1"]))
    fleet.role_maker.get_pserver_endpoints().clear()
    with fresh(), pytest.raises(ValueError, match="2 workers have no servers"):
        fleet.distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(script.net()[0])
