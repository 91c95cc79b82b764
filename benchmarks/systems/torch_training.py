"""A worker of torch elastic: DistributedDataParallel over gloo, and a checkpoint of rank 0.

    torchrun ... torch_training.py [--save replaced]

As in PyTorch's guide, `torch.save` writes over the checkpoint before; with `--save replaced`, it
writes beside it and renames.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from systems import task
from systems.torch_network import Network


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of torch elastic.")
    parser.add_argument("--save", choices=("over", "replaced"), default="over")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    task.report(f"worker-{rank}", "process", os.getpid())
    network = Network()
    optimizer = network.optimizer()
    done, path = 0, task.saves() / "checkpoint.pt"
    if path.exists():
        done = network.restore(torch.load(path), optimizer)
    task.report(f"worker-{rank}", "restored", done)
    trained = DistributedDataParallel(network)
    for number in range(done + 1, task.STEPS + 1):
        x, y = map(torch.from_numpy, task.batch_of(number, rank, size))
        optimizer.zero_grad()
        trained(x, y, number).backward()
        optimizer.step()
        task.report(f"worker-{rank}", "step", number)
        if rank == 0 and number % task.SAVE_EVERY == 0:
            written = path if arguments.save == "over" else path.with_suffix(".new")
            torch.save(network.state(number, optimizer), written)
            written.replace(path)
            task.report("worker-0", "saved", number)
        time.sleep(task.PAUSE_S)
    if rank == 0:
        network.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
