"""A fluid script that trains as one of several processes, or as all ranks on devices of one."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.base.role_maker import UserDefinedCollectiveRoleMaker
from jaxfleet.fluid.incubate.fleet.collective import DistributedStrategy, fleet
from jaxfleet.runtime.rank_executor import RanksProgram

ROWS, STEPS = 16, 5
MODES = ("nccl2", "fleet", "grad_allreduce", "local_sgd")


def network(minimize: Callable[[Any, Any], object] | None = None) -> tuple[Any, Any, Any]:
    """Returns a program, its startup and its loss.

    Args:
        minimize: called with the optimizer and the loss, instead of the optimizer's method.
    """
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.unique_name.guard():
        x, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1])
        hidden = fluid.layers.fc(x, 5, act="tanh")
        guess = fluid.layers.fc(hidden, 1)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(guess, y))
        optimizer = fluid.optimizer.Momentum(0.1, 0.9)
        (minimize or (lambda by, what: by.minimize(what)))(optimizer, loss)
    return main, startup, loss


def batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.standard_normal((ROWS, 6), np.float32)
    return {"x": x, "y": np.sin(x.sum(1, keepdims=True))}


def share(rows: dict[str, np.ndarray], rank: int, ranks: int) -> dict[str, np.ndarray]:
    each = ROWS // ranks
    return {name: value[rank * each : (rank + 1) * each] for name, value in rows.items()}


def transpiled(main: Any, startup: Any, mode: str, rank: int, endpoints: list[str]) -> None:
    """Transpiles programs for a rank."""
    config = fluid.DistributeTranspilerConfig()
    config.mode = "nccl2" if mode == "nccl2" else "collective"
    config.collective_mode = mode
    config.nccl_comm_num = len(endpoints) - 1
    config.use_hierarchical_allreduce = mode == "nccl2" and len(endpoints) == 4
    fluid.DistributeTranspiler(config).transpile(
        rank,
        program=main,
        startup_program=startup,
        trainers=",".join(endpoints),
        current_endpoint=endpoints[rank],
    )


def train(
    mode: str, rank: int, endpoints: list[str], *, devices: int, alone: bool
) -> dict[str, np.ndarray]:
    """Trains; returns the parameters, and the losses of this process's devices.

    Args:
        mode: `nccl2`, or a collective one.
        rank: whose program runs.
        endpoints: one of each rank.
        devices: number of devices of each process, in the mode `nccl2`.
        alone: this process has the devices and rows of all.
    """
    if mode == "fleet" and not alone:
        return train_fleet(rank, endpoints)
    main, startup, loss = network()
    ranks, scope = len(endpoints), fluid.Scope()
    of_devices = mode in {"nccl2", "fleet"}
    if not (alone and of_devices):
        transpiled(main, startup, mode, rank, endpoints)
    exe = fluid.Executor(fluid.CPUPlace())
    startup.random_seed = 5 if alone else 5 + rank  # rank 0's values are broadcast
    exe.run(startup, scope=scope)
    runs = main
    if of_devices:
        build = fluid.BuildStrategy()
        if not alone:
            build.num_trainers, build.trainer_id = ranks, rank
        places = fluid.cpu_places(devices * ranks if alone else devices)
        runs = fluid.CompiledProgram(main).with_data_parallel(loss.name, build, places=places)
    losses = []
    for step in range(STEPS):
        rows = batch(step)
        feed = rows if alone else share(rows, rank, ranks)
        losses.append(exe.run(runs, feed=feed, fetch_list=[loss], scope=scope)[0])
    found = {p.name: np.array(scope.peek(p.name)) for p in main.all_parameters()}
    sums = sums_of(runs._replicas._known.get(main) if of_devices else exe._ranks._known.get(main))
    if mode == "nccl2" and not alone:  # each rank's own seed causes a warning
        exe.run(startup, scope=scope)
        exe.run(runs, feed=share(batch(0), rank, ranks), fetch_list=[loss], scope=scope)
    return {**found, "losses": np.stack(losses), "sums": sums}


def sums_of(known: Mapping[Any, RanksProgram]) -> np.ndarray:
    """Returns the numbers of all-reduces, exchanges and cuts of the one program that ran."""
    (ready,) = known.values()
    ops = [op for block in ready.program.blocks for op in block.ops]
    sums = [op for op in ops if op.type == "c_allreduce_sum"]
    exchanges = sum(bool(op.attrs.get("exchange")) for op in sums)
    return np.array([len(sums), exchanges, sum(op.type == "cut" for op in ops)])


def train_fleet(rank: int, endpoints: list[str]) -> dict[str, np.ndarray]:
    """Trains by the collective fleet; returns as `train`."""
    fleet.init(UserDefinedCollectiveRoleMaker(rank, endpoints))
    strategy = DistributedStrategy()
    strategy.fuse_all_reduce_ops = False
    strategy.forward_recompute = True  # which does not change results

    def minimize(optimizer: Any, loss: Any) -> None:
        (hidden,) = [op for op in loss.block.ops if op.type == "tanh"]
        strategy.recompute_checkpoints = hidden.output("Out")
        fleet.distributed_optimizer(optimizer, strategy).minimize(loss)

    main, startup, loss = network(minimize)
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    startup.random_seed = 5 + rank
    exe.run(startup, scope=scope)
    losses = []
    for step in range(STEPS):
        feed = share(batch(step), rank, len(endpoints))
        losses.append(exe.run(fleet.main_program, feed=feed, fetch_list=[loss], scope=scope)[0])
    found = {p.name: np.asarray(scope.peek(p.name)) for p in main.all_parameters()}
    sums = sums_of(fleet.main_program._replicas._known.get(main))
    return {**found, "losses": np.stack(losses), "sums": sums}


def main() -> None:
    """Trains in all modes as one rank, and writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--by-hand", action="store_true", help="the programs alone name the ranks")
    args = parser.parse_args()
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    endpoints = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
    if args.by_hand:
        del os.environ["PADDLE_TRAINER_ID"], os.environ["PADDLE_TRAINER_ENDPOINTS"]
    for mode in MODES:
        found = train(mode, rank, endpoints, devices=args.devices, alone=False)
        np.savez(args.out / f"{mode}-{rank}.npz", **found)  # type: ignore[arg-type]  # numpy's stub: no array may be called allow_pickle


if __name__ == "__main__":
    main()
