"""Trains a small net with a table on servers, in one mode after another, as an old script does.

Run by every process of a job; its role is in the environment. Trainers write their losses to a
file.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet import fluid
from tests.fluid.pserver import test_distributed_table, test_sparse
from tests.fluid.pserver.jobs import Build, Feed, shared_out

FED: list[Feed] = test_sparse.batches(4)
DISTRIBUTED: list[Feed] = test_distributed_table.batches(4)


def transpiler_of(mode: str) -> Any:
    config = fluid.DistributeTranspilerConfig()
    if mode in {"async", "half_async"}:
        config.sync_mode = False
        config.runtime_split_send_recv = mode == "async"
    if mode == "geo":
        config.geo_sgd_need_push_nums = 2
        return fluid.transpiler.GeoSgdTranspiler(config)
    return fluid.DistributeTranspiler(config)


BUILDS: dict[str, Build] = {
    "sync": test_sparse.net,
    "async": test_sparse.net,
    "half_async": test_sparse.net,
    "geo": test_sparse.net,
    "distributed": partial(test_distributed_table.net, 1 << 40),
}


def train(
    mode: str, endpoints: Sequence[str], role: str, number: int, trainers: int
) -> list[float]:
    """Takes part in training by one mode; returns a trainer's losses."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    losses: list[float] = []
    with fluid.unique_name.guard(), fluid.program_guard(main, startup), fluid.scope_guard(scope):
        main.random_seed = startup.random_seed = 7
        loss = BUILDS[mode]()
        transpiler = transpiler_of(mode)
        transpiler.transpile(
            number if role == "TRAINER" else 0, pservers=",".join(endpoints), trainers=trainers,
            sync_mode=mode in {"sync", "distributed"},
        )  # fmt: skip
        exe = fluid.Executor(fluid.CPUPlace())
        if role == "PSERVER":
            served, begins = transpiler.get_pserver_programs(endpoints[number])
            exe.run(begins)
            exe.run(served)
        else:
            trained = transpiler.get_trainer_program()
            exe.run(startup)
            fed = shared_out(DISTRIBUTED if mode == "distributed" else FED, trainers)[number]
            ran = [exe.run(trained, feed=dict(batch), fetch_list=[loss])[0] for batch in fed]
            losses = [float(value[0]) for value in ran]
        exe.close()
    return losses


def main() -> None:
    """Trains by each mode in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number", type=int, required=True)
    args = parser.parse_args()
    role = os.environ["PADDLE_TRAINING_ROLE"]
    trainers = int(os.environ["PADDLE_TRAINERS_NUM"])
    endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    found = {
        mode: np.array(train(mode, endpoints[2 * at : 2 * at + 2], role, args.number, trainers))
        for at, mode in enumerate(BUILDS)
    }
    if role == "TRAINER":
        np.savez(args.out / f"trainer{args.number}.npz", allow_pickle=False, **found)


if __name__ == "__main__":
    main()
