"""A driver of Ray Train: TorchTrainer with two workers, on a cluster that runs already.

    ray_training.py ADDRESS

Workers report a checkpoint of rank 0, and begin with the last one that Ray has.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

from systems import task
from systems.torch_network import Network

MAX_FAILURES = 3


def train_worker(_: Any) -> None:
    """Trains in a worker of Ray."""
    rank, size = dist.get_rank(), dist.get_world_size()
    task.report(f"worker-{rank}", "process", os.getpid())
    network = Network()
    optimizer = network.optimizer()
    done = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            done = network.restore(torch.load(Path(folder) / "checkpoint.pt"), optimizer)
    task.report(f"worker-{rank}", "restored", done)
    trained = prepare_model(network)
    for number in range(done + 1, task.STEPS + 1):
        x, y = map(torch.from_numpy, task.batch_of(number, rank, size))
        optimizer.zero_grad()
        trained(x, y, number).backward()
        optimizer.step()
        task.report(f"worker-{rank}", "step", number)
        if number % task.SAVE_EVERY == 0:
            report(rank, number, network, optimizer)
        time.sleep(task.PAUSE_S)
    if rank == 0:
        network.finish()


def report(rank: int, number: int, network: Network, optimizer: torch.optim.Optimizer) -> None:
    """Hands Ray a checkpoint of rank 0; every rank takes part."""
    if rank:
        train.report({"step": number})
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(network.state(number, optimizer), Path(folder) / "checkpoint.pt")
        train.report({"step": number}, checkpoint=train.Checkpoint.from_directory(folder))
    task.report("worker-0", "saved", number)


def main() -> None:
    parser = argparse.ArgumentParser(description="A driver of Ray Train.")
    parser.add_argument("address")
    arguments = parser.parse_args()
    ray.init(address=arguments.address, log_to_driver=False)
    TorchTrainer(
        train_worker,
        train_loop_config={},
        scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=train.RunConfig(
            name="faults",
            storage_path=str(task.saves()),
            failure_config=train.FailureConfig(max_failures=MAX_FAILURES),
            checkpoint_config=train.CheckpointConfig(num_to_keep=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
