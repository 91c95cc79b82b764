"""Overhead of jaxfleet's collective step over one written by hand.

    python benchmarks/collective_step.py [--quick]

The step by hand is a donated `jit(shard_map)` with `lax.pmean` on the gradients; jaxfleet gets the
one-device step. Both train the same models from the same state with Adam, on 4 and on 8 devices
emulated on the CPU, and wait for every step. Bars: at most 1.02 times the time, plus the spread
of the step by hand against itself; no more floating point operations; no more temporary bytes,
except for one scalar.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from common import Bar, Comparison, Plan, Side, Step, compare, print_table, run
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import Model, models

import jaxfleet as jf

AXIS = "devices"
ROWS = PartitionSpec(AXIS)
WHOLE = PartitionSpec()
ONE_SCALAR = 1.0001  # a sum as a result needs a slot, of 64 bytes, that a mean's division saves
HEADS = ("", "by hand, ms", "jaxfleet, ms", "ratio", "by hand/itself", "Mflops", "temporary kB")

Gradients = Callable[[Any, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Compiled:
    """A compiled step, with XLA's counts for one device."""

    step: Step
    flops: float
    temp_bytes: int
    waits: bool  # for its own results


def measure(devices: int, plan: Plan) -> list[Bar]:
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    bars: list[Bar] = []
    rows: list[Sequence[str]] = []
    for model in models():
        params = model.init()
        start = {"params": params, "opt": optax.adam(1e-3).init(params)}
        state = jax.device_put(start, NamedSharding(mesh, WHOLE))
        batch = jax.device_put(model.batch, NamedSharding(mesh, ROWS))
        hand, ours = by_hand(model, mesh, state, batch), by_jaxfleet(model, state, batch)
        a, b, again = (side(compiled, state, batch) for compiled in (hand, ours, hand))
        times = compare(a, b, again, plan)
        where = f"{model.name} on {devices} devices"
        rows.append(row_of(where, times, hand, ours))
        bars += bars_of(where, times, hand, ours)
    print_table(HEADS, rows)
    return bars


def by_hand(model: Model, mesh: Mesh, state: Any, batch: Any) -> Compiled:
    def gradients(params: Any, batch: Any) -> Any:
        return jax.lax.pmean(jax.value_and_grad(model.loss)(params, batch), AXIS)

    train_step = adam_step(optax.adam(1e-3), gradients)
    local = jax.shard_map(
        train_step, mesh=mesh, in_specs=(WHOLE, ROWS), out_specs=WHOLE, check_vma=False
    )
    step = jax.jit(local, donate_argnums=0)
    return counted(step, step.lower(state, batch).compile(), waits=False)


def by_jaxfleet(model: Model, state: Any, batch: Any) -> Compiled:
    tx = jf.distributed_optimizer(optax.adam(1e-3))
    train_step = adam_step(tx, jax.value_and_grad(model.loss))
    step = jf.distribute(train_step, example=(state, batch), strategy="collective")
    return counted(step, step, waits=True)


def adam_step(tx: optax.GradientTransformation, gradients: Gradients) -> Step:
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = gradients(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return train_step


def counted(step: Step, analyses: Any, *, waits: bool) -> Compiled:
    temp_bytes = analyses.memory_analysis().temp_size_in_bytes
    return Compiled(step, analyses.cost_analysis()["flops"], temp_bytes, waits)


def side(compiled: Compiled, state: Any, batch: Any) -> Side:
    return Side(compiled.step, state, batch, waits=compiled.waits)


def row_of(where: str, times: Comparison, hand: Compiled, ours: Compiled) -> Sequence[str]:
    return (
        where,
        f"{times.baseline_ms:.2f}",
        f"{times.candidate_ms:.2f}",
        f"{times.ratio:.3f}",
        "{:.3f} to {:.3f}".format(*times.itself),
        f"{hand.flops / 1e6:.2f}, {ours.flops / 1e6:.2f}",
        f"{hand.temp_bytes / 1e3:.0f}, {ours.temp_bytes / 1e3:.0f}",
    )


def bars_of(where: str, times: Comparison, hand: Compiled, ours: Compiled) -> list[Bar]:
    return [
        Bar(f"{where}: time over by hand", times.ratio, 1.02, times.spread),
        Bar(f"{where}: flops over by hand", ours.flops / hand.flops, 1.0),
        Bar(
            f"{where}: temporary bytes over by hand", ours.temp_bytes / hand.temp_bytes, ONE_SCALAR
        ),
    ]


if __name__ == "__main__":
    run("collective_step", __file__, measure, device_counts=(4, 8))
