"""A user's script, run by every process of a job, with optional faults."""

import argparse
import os
import time

import numpy as np

from jaxfleet import fluid


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--end-at", type=int, default=-1, help="close before this step")
    parser.add_argument("--exit-at", type=int, default=-1, help="end without close there")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--stop-at", type=int, default=-1, help="do nothing more there")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--pause", type=float, default=0.0)
    return parser.parse_args()


def build(optimizer: str) -> fluid.Variable:
    x = fluid.layers.data("x", [4])
    y = fluid.layers.data("y", [1])
    loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
    getattr(fluid.optimizer, optimizer)(0.1).minimize(loss)
    return loss


def train(exe: fluid.Executor, main: fluid.Program, loss: fluid.Variable, number: int) -> None:
    """Takes the steps of a trainer."""
    args, random = arguments(), np.random.default_rng(number)
    for step in range(1, args.steps + 1):
        if step == args.end_at:
            break
        if step == args.exit_at:
            return
        if step == args.raise_at:
            raise RuntimeError("the script failed")
        if step == args.stop_at:
            time.sleep(1000.0)
        x = random.normal(size=(8, 4)).astype(np.float32)
        (value,) = exe.run(main, feed={"x": x, "y": x[:, :1]}, fetch_list=[loss])
        print(f"step {step}. loss {float(value[0]):.4f}", flush=True)  # noqa: T201
        time.sleep(args.pause)
    exe.close()


def main() -> None:
    loss, role = build(arguments().optimizer), os.environ["PADDLE_TRAINING_ROLE"]
    number = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    config = fluid.DistributeTranspilerConfig()
    config.wait_port = False  # the first run finds out whether there are servers
    transpiler = fluid.DistributeTranspiler(config)
    transpiler.transpile(
        number,
        pservers=os.environ["PADDLE_PSERVERS_IP_PORT_LIST"],
        trainers=int(os.environ["PADDLE_TRAINERS_NUM"]),
    )
    exe = fluid.Executor(fluid.CPUPlace())
    if role == "PSERVER":
        served, begins = transpiler.get_pserver_programs(os.environ["PADDLE_CURRENT_ENDPOINT"])
        exe.run(begins)
        print("serving", flush=True)  # noqa: T201
        exe.run(served)
        print("served", flush=True)  # noqa: T201
    else:
        exe.run(fluid.default_startup_program())
        train(exe, transpiler.get_trainer_program(), loss, number)


if __name__ == "__main__":
    main()
