"""A user's Downpour job, run by every process of it.

`PADDLE_TRAINING_ROLE`, `PADDLE_TRAINER_ID`, `PADDLE_PSERVERS_IP_PORT_LIST`, `PADDLE_TRAINERS_NUM`
and `PADDLE_CURRENT_ENDPOINT` specify the role; the arguments are the files of this worker.
"""

import hashlib
import os
import sys

import numpy as np

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.contrib.downpour.jobs import ctr, dataset


def main() -> None:
    endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    workers = int(os.environ["PADDLE_TRAINERS_NUM"])
    fluid.default_startup_program().random_seed = 1
    loss, out, fed = ctr(data_norm=True)
    auc, _, _ = layers.auc(out, fed[-1])
    fluid.distributed.DownpourSGD(0.1).minimize([loss])
    program, exe = fluid.default_main_program(), fluid.Executor()
    job = fluid.distributed.DownpourJob(endpoints, workers)
    if os.environ["PADDLE_TRAINING_ROLE"] == "PSERVER":
        job.serve([program], os.environ["PADDLE_CURRENT_ENDPOINT"])
        print("served", flush=True)  # noqa: T201
        return
    exe.run(fluid.default_startup_program())
    job.connect([program], int(os.environ["PADDLE_TRAINER_ID"]))
    for _ in range(3):
        exe.train_from_dataset(program, dataset(fed, sys.argv[1:], 32), fetch_list=[auc])
    digest = hashlib.sha256(np.array(fluid.global_scope()["w"]).tobytes()).hexdigest()
    job.stop()
    print(f"w is {digest}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
