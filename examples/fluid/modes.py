"""Three modes of a fluid script: the part of each example after `minimize`.

single     an Executor, on one device
parallel   a ParallelExecutor, on four devices that are emulated on the CPU
pserver    DistributeTranspiler; every process runs the script, with its role in the environment:

    jaxfleet launch --servers 2 --trainers 2 --servers-run-script SCRIPT --mode pserver
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxfleet import fluid

DEVICES = 4


def arguments(*, epochs: int, tables: Iterable[str] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    if tables := tuple(tables):
        parser.add_argument("--table", choices=tables, default=tables[0])
    parser.add_argument("--mode", choices=("single", "parallel", "pserver"), default="single")
    parser.add_argument("--epochs", type=int, default=epochs)
    return parser.parse_args()


@contextmanager
def training(
    mode: str, loss: fluid.Variable, test_program: fluid.Program | None = None
) -> Iterator[Callable[[dict[str, Any]], float]]:
    """Yields a step that trains on a batch of rows and returns their loss; servers serve here.

    A test program with lookups in servers' tables gets the rows at the end of training, from a save
    of the first trainer; the other trainers end with it.
    """
    if mode == "parallel":
        os.environ["CPU_NUM"] = str(DEVICES)  # an Executor starts the devices
    exe = fluid.Executor(fluid.CPUPlace())
    main, startup = fluid.default_main_program(), fluid.default_startup_program()
    if mode == "parallel":
        exe.run(startup)
        parallel = fluid.ParallelExecutor(use_cuda=False, loss_name=loss.name, main_program=main)
        yield lambda feed: float(np.mean(parallel.run([loss.name], feed=feed)[0]))
    else:
        program = main if mode == "single" else transpiled(exe)
        exe.run(startup)
        yield lambda feed: float(exe.run(program, feed=feed, fetch_list=[loss])[0].mean())
        if mode == "pserver" and test_program is not None:
            bring_tables(exe, program, test_program)
    exe.close()


def bring_tables(exe: fluid.Executor, program: fluid.Program, test_program: fluid.Program) -> None:
    """Saves the trained tables of a job, as one would to keep them, and loads them here."""
    if int(os.environ["PADDLE_TRAINER_ID"]) > 0:
        exe.close()
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        fluid.io.save_persistables(exe, folder, program)
        fluid.io.load_persistables(exe, folder, test_program)


def transpiled(exe: fluid.Executor) -> fluid.Program:
    """Returns a trainer's program; a server serves until the trainers have ended."""
    trainers = int(os.environ["PADDLE_TRAINERS_NUM"])
    pservers = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"]
    trainer_id = int(os.getenv("PADDLE_TRAINER_ID", "0"))
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(trainer_id, pservers=pservers, trainers=trainers)
    if os.environ["PADDLE_TRAINING_ROLE"] == "PSERVER":
        endpoint = os.environ["PADDLE_CURRENT_ENDPOINT"]
        program, startup = transpiler.get_pserver_programs(endpoint)
        exe.run(startup)
        exe.run(program)
        sys.exit()
    return transpiler.get_trainer_program()


def own_rows(mode: str, batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """Yields this process's rows of each batch: all, unless there are several trainers."""
    first, step = 0, 1
    if mode == "pserver":
        first, step = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    for rows in batches:
        yield rows[first::step]
