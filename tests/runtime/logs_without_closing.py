"""A script that logs three steps and ends without closing the log: `FOLDER`."""

import sys

import optax

import jaxfleet as jf
from tests.runtime.toys import rows, start, training

tx = jf.distributed_optimizer(optax.sgd(0.1))
step = jf.distribute(training(tx), (start(tx), rows(8)), "single")
step.log_to(sys.argv[1])
state = start(tx)
for _ in range(3):
    state, _ = step(state, rows(8))
