"""A user's fleet script, run by every process of a job, or by a single one."""

import argparse
import sys
from pathlib import Path

import numpy as np

from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler import fleet
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import (  # noqa: E501
    StrategyFactory,
)

ROWS = 8  # of a step, of all workers


def net() -> tuple[fluid.Variable, fluid.Variable]:
    """Returns the loss and the prediction: one parameter is sliced, another begins at random."""
    x = fluid.data("x", [None, 64])
    y = fluid.data("y", [None, 1])
    hidden = fluid.layers.fc(x, 300, act="tanh", param_attr="w1", bias_attr="b1")
    out = fluid.layers.fc(hidden, 1, param_attr="w2", bias_attr="b2")
    return fluid.layers.mean(fluid.layers.square_error_cost(out, y)), out


def batch(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(ROWS, 64)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :1])}


def begin() -> tuple[fluid.Variable, fluid.Variable]:
    fluid.default_main_program().random_seed = fluid.default_startup_program().random_seed = 3
    return net()


def work(out: Path, steps: range, loss: fluid.Variable, predicted: fluid.Variable) -> None:
    number, exe = fleet.worker_index(), fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    exe.run(fleet.startup_program)
    compiled = fluid.CompiledProgram(fleet.main_program).with_data_parallel(
        loss_name=loss.name,
        build_strategy=StrategyFactory.create_sync_strategy().get_build_strategy(),
    )
    losses = []
    for step in steps:
        mine = {name: rows[number :: fleet.worker_num()] for name, rows in batch(step).items()}
        losses.append(float(exe.run(compiled, feed=mine, fetch_list=[loss])[0][0]))
    np.save(out / f"losses{number}.npy", losses)
    if fleet.is_first_worker():
        fleet.save_persistables(exe, str(out / "kept"))
        fleet.save_inference_model(exe, str(out / "model"), ["x"], [predicted])
    files = fleet.split_files(["a", "b", "c"])
    fleet.stop_worker()
    print(f"worker {number} has {files}", flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model-dir")
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    loss, predicted = begin()
    fleet.init(PaddleCloudRoleMaker())
    optimizer = fleet.distributed_optimizer(
        fluid.optimizer.Adam(0.01), StrategyFactory.create_sync_strategy()
    )
    optimizer.minimize(loss)
    if fleet.is_server():
        fleet.init_server(args.model_dir)
        fleet.run_server()
        print(f"server {fleet.server_index()} has served", flush=True)  # noqa: T201
        sys.exit(0)
    work(args.out, range(args.first, args.first + 3), loss, predicted)


if __name__ == "__main__":
    main()
