"""A process of a fluid 1.8.5 job, for Python 3.7: a server or a trainer of DistributeTranspiler.

    fluid_training.py PSERVER 0 127.0.0.1:7000,127.0.0.1:7001 [--mode sync]

Trainer 0 saves with `save_persistables`; servers begin with what `load_persistables` reads.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np
from paddle import fluid  # type: ignore[import-not-found]

from systems import task

TRAINERS = 2
ROWS = task.ROWS // TRAINERS


def build() -> Any:
    """Builds the network of `task` in the default program; returns the loss."""
    values = task.start()

    def parameter(name: str) -> Any:
        value = values[name]
        given = fluid.initializer.NumpyArrayInitializer(value)
        rate = 1.0 / task.RATE if name in task.COUNTS else 1.0
        attribute = fluid.ParamAttr(name=name, initializer=given, learning_rate=rate)
        return fluid.layers.create_parameter(list(value.shape), "float32", attr=attribute)

    each = {name: parameter(name) for name in values}
    x = fluid.data("x", [ROWS, task.INPUTS], "float32")
    y = fluid.data("y", [ROWS, 1], "int64")
    at = fluid.data("at", [task.STEPS], "float32")  # 1 at the step's number
    hidden = fluid.layers.tanh(fluid.layers.matmul(x, each["a"]) + each["b"])
    logits = fluid.layers.matmul(hidden, each["c"]) + each["d"]
    loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(logits, y))
    for name in task.COUNTS:
        loss = loss - fluid.layers.reduce_sum(each[name] * at)
    # Momentum would count each step more than once; fluid has one optimizer for a program.
    fluid.optimizer.SGD(task.RATE).minimize(loss)
    return loss


def serve(executor: Any, transpiler: Any, endpoint: str) -> None:
    """Serves until the trainers have left."""
    program, startup = transpiler.get_pserver_programs(endpoint)
    executor.run(startup)
    if saved():
        fluid.io.load_persistables(executor, str(task.saves() / "saved"), program)
    executor.run(program)


def saved() -> int:
    """Returns the step of the checkpoint, 0 if there is none."""
    path = task.saves() / "step"
    return int(path.read_text()) if path.exists() else 0


def train(executor: Any, transpiler: Any, loss: Any, rank: int) -> None:
    program = transpiler.get_trainer_program()
    executor.run(fluid.default_startup_program())
    done = saved()
    task.report(f"trainer-{rank}", "restored", done)
    for number in range(done + 1, task.STEPS + 1):
        x, y = task.batch_of(number, rank, TRAINERS)
        at = np.zeros(task.STEPS, np.float32)
        at[number - 1] = 1.0
        executor.run(program, feed={"x": x, "y": y[:, None], "at": at}, fetch_list=[loss])
        task.report(f"trainer-{rank}", "step", number)
        if rank == 0 and number % task.SAVE_EVERY == 0:
            fluid.io.save_persistables(executor, str(task.saves() / "saved"), program)
            (task.saves() / "step").write_text(str(number))
            task.report("trainer-0", "saved", number)
        time.sleep(task.PAUSE_S)
    if rank == 0:
        scope = fluid.global_scope()
        task.finish({name: np.array(scope.find_var(name).get_tensor()) for name in task.start()})
    executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of a fluid job.")
    parser.add_argument("role", choices=("PSERVER", "TRAINER"))
    parser.add_argument("number", type=int)
    parser.add_argument("servers")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    arguments = parser.parse_args()
    member = "server" if arguments.role == "PSERVER" else "trainer"
    task.report(f"{member}-{arguments.number}", "process", os.getpid())
    loss = build()
    configuration = fluid.DistributeTranspilerConfig()
    configuration.slice_var_up = False  # a server would initialize each slice with the whole array
    transpiler = fluid.DistributeTranspiler(config=configuration)
    rank = arguments.number if member == "trainer" else 0
    sync = arguments.mode == "sync"
    endpoint = arguments.servers.split(",")[arguments.number]  # a trainer has no use for it
    transpiler.transpile(
        rank,
        pservers=arguments.servers,
        trainers=TRAINERS,
        sync_mode=sync,
        current_endpoint=endpoint,  # without it, `load_persistables` reads nothing, without a word
    )
    executor = fluid.Executor(fluid.CPUPlace())
    if member == "server":
        serve(executor, transpiler, endpoint)
    else:
        train(executor, transpiler, loss, rank)


if __name__ == "__main__":
    main()
