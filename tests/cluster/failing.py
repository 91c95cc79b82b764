"""Job in which one rank deviates from the others.

`python failing.py WHAT RANK`: that rank does WHAT, usually after three steps.
"""

import os
import signal
import sys
import time

import optax

import jaxfleet as jf
from tests.runtime import toys

LOST_S = 2.0
STEP_S = 6.0
AFTER = 3
ROWS = 8


def do(what: str) -> None:
    """Performs an action that the others must notice."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "leave":
        sys.exit(0)
    elif what == "fail":
        raise ValueError("no such file: rows.csv")
    elif what == "sleep":
        time.sleep(1000)


def main(what: str, rank: int) -> None:
    """Trains until the others notice."""
    place = jf.initialize(connect_s=60.0)
    is_it = place.rank == rank
    tx = jf.distributed_optimizer(optax.adam(0.2 if is_it and what == "program" else 0.1))
    state = toys.start(tx)
    strategy = jf.DistributedStrategy(lost_after_s=LOST_S, step_timeout_s=STEP_S)
    step = jf.distribute(toys.training(tx), (state, toys.rows(ROWS)), strategy)
    seed = place.rank if what == "fail" else 0  # rows of each rank's own are allowed to differ
    for number in range(1, 100_000):
        more = is_it and what == "rows" and number > AFTER
        state, _ = step(state, toys.rows(ROWS * 2 if more else ROWS, seed=seed))
        if is_it and number == AFTER:
            sys.stdout.write("now\n")
            sys.stdout.flush()
            do(what)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
