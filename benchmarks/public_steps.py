"""Time of jaxfleet's collective step, against jax's own partitioning of the same program.

    python benchmarks/public_steps.py [--quick]

Small programs of the kinds that public examples train, in `benchmarks/public/`: language models
in the styles of several libraries, sharpness-aware minimization, L-BFGS with a line search, TD3 and
SAC, a variational autoencoder, low-rank tuning, a click model, images with texts, a mixture of
experts. jax gets the one-device step under `jit` with the batch cut by a `NamedSharding`; jaxfleet
gets the same step. Both donate, train from the same state on 4 devices emulated on the CPU, and
wait for every step. Bar: at most 1.1 times the processor time, plus the spread of jax's step
against itself; and at most a hundredth more floating point operations or temporary bytes than
jax's. Wall time is shown too, since it differs on a busy machine.
"""

import itertools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from common import Bar, Comparison, Plan, Side, no_collection, print_table, run, sum_up
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from public import language, others

import jaxfleet as jf

AXIS = "devices"
HEADS = (
    "",
    "jit, ms of CPU",
    "jaxfleet",
    "ratio",
    "jit/itself",
    "by the clock",
    "jit/itself",
    "flops",
    "temporary bytes",
    "all-reduces, jit and jaxfleet",
)
STEPS = 4  # in one timing: some take a tenth of a second


def measure(devices: int, plan: Plan) -> list[Bar]:
    plan = replace(plan, steps=STEPS, warm_up=2)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    bars: list[Bar] = []
    table: list[Sequence[str]] = []
    for program in (*language.programs(), *others.programs()):
        state, batch = jax.device_put(program.state, whole), jax.device_put(program.batch, rows)
        theirs = jax.jit(program.make(lambda tx: tx), donate_argnums=0)
        ours: Any = jf.distribute(
            program.make(jf.distributed_optimizer), (state, batch), "collective"
        )
        compiled = theirs.lower(state, batch).compile()
        flops, held = (x / y for x, y in zip(_counted(ours), _counted(compiled), strict=True))
        a, again = (Side(theirs, state, batch) for _ in range(2))
        used, took = _compared((a, Side(ours, state, batch, waits=True), again), plan)
        table.append(
            (
                program.name,
                f"{used.baseline_ms:.2f}",
                f"{used.candidate_ms:.2f}",
                f"{used.ratio:.3f}",
                "{:.3f} to {:.3f}".format(*used.itself),
                f"{took.ratio:.3f}",
                "{:.3f} to {:.3f}".format(*took.itself),
                f"{flops:.3f}",
                f"{held:.3f}",
                f"{_all_reduces(compiled)} and {_all_reduces(ours)}",
            )
        )
        print(*table[-1], sep=", ", file=sys.stderr, flush=True)  # all programs take some minutes
        name = f"{program.name} on {devices} devices"
        bars.append(Bar(f"{name}: processor time over jit", used.ratio, 1.1, used.spread))
        bars.append(Bar(f"{name}: flops over jit", flops, 1.01))
        bars.append(Bar(f"{name}: temporary bytes over jit", held, 1.01))
    print_table(HEADS, table)
    return bars


def _compared(sides: Sequence[Side], plan: Plan) -> tuple[Comparison, Comparison]:
    """Runs the sides in alternating rounds; returns their CPU and wall times."""
    for side in sides:
        side.seconds(plan.warm_up)
    orders = itertools.cycle(itertools.permutations(range(len(sides))))
    used: list[tuple[float, ...]] = []
    took: list[tuple[float, ...]] = []
    with no_collection():
        for order in itertools.islice(orders, plan.rounds):
            each = {}
            for index in order:
                started = time.process_time()
                seconds = sides[index].seconds(plan.steps)
                each[index] = time.process_time() - started, seconds
            pairs = [each[index] for index in range(len(sides))]
            used.append(tuple(cpu for cpu, _ in pairs))
            took.append(tuple(wall for _, wall in pairs))
    return sum_up(used, steps=plan.steps), sum_up(took, steps=plan.steps)


def _counted(compiled: Any) -> tuple[float, float]:
    """Returns the flops and the temporary bytes of one device, as XLA counts them."""
    held: float = compiled.memory_analysis().temp_size_in_bytes
    return float(compiled.cost_analysis()["flops"]), held


def _all_reduces(compiled: Any) -> int:
    """Returns the number of all-reduces in a step's text, each of any number of arrays."""
    return len(re.findall(r" all-reduce\(", compiled.as_text()))


if __name__ == "__main__":
    run("public_steps", __file__, measure, device_counts=(4,))
