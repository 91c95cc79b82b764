"""Trains the recorded net on servers, as an old script does: one optimizer after another.

Run by every process of a job; its role is in the environment. Trainers write their results to a
file: the loss of every step, and the final parameters.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfleet import fluid
from tests.fluid.test_training import batches, net, optimizer


def train(name: str, endpoints: Sequence[str], role: str, number: int) -> dict[str, np.ndarray]:
    """Takes part in training by one optimizer; returns a trainer's results."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    seen: dict[str, np.ndarray] = {}
    with fluid.unique_name.guard(), fluid.program_guard(main, startup), fluid.scope_guard(scope):
        loss = net()
        optimizer(name).minimize(loss)
        transpiler = fluid.DistributeTranspiler()
        transpiler.transpile(number, pservers=",".join(endpoints), trainers=2)
        exe = fluid.Executor(fluid.CPUPlace())
        if role == "PSERVER":
            served, begins = transpiler.get_pserver_programs(endpoints[number])
            exe.run(begins)
            exe.run(served)
        else:
            trained = transpiler.get_trainer_program()
            exe.run(startup)
            losses = [exe.run(trained, feed=fed, fetch_list=[loss])[0] for fed in batches(number)]
            seen = {p.name: np.asarray(scope[p.name]) for p in trained.all_parameters()}
            seen["losses"] = np.ravel(losses)
        exe.close()
    return {f"{name} {key}": value for key, value in seen.items()}


def main() -> None:
    """Trains by each requested optimizer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimizers", nargs="+", required=True)
    parser.add_argument("--number", type=int, required=True)
    args = parser.parse_args()
    role = os.environ["PADDLE_TRAINING_ROLE"]
    endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    found: dict[str, np.ndarray] = {}
    for at, name in enumerate(args.optimizers):
        found |= train(name, endpoints[2 * at : 2 * at + 2], role, args.number)
    if role == "TRAINER":
        np.savez(args.out / f"trainer{args.number}.npz", allow_pickle=False, **found)


if __name__ == "__main__":
    main()
