"""Overhead of `step()` over the jitted function that it calls.

    python benchmarks/call_overhead.py [--quick]

The step trains 500 small parameters with Adam: 1,501 arrays go in and out of a call that computes
almost nothing, so the overhead around XLA shows. It runs on one device, where that overhead is most
of the time; `--devices 4` is for the curious. Both sides run the same executable on arrays already
in place, and wait for every step. The bar is 1.05 times the raw call, plus the spread of the raw
call against itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Bar, Plan, Side, compare, print_table, run
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf

LAYERS = 250  # of two parameters each
HEADS = ("", "raw call, ms", "step(), ms", "ratio", "raw/itself")


def measure(devices: int, plan: Plan) -> list[Bar]:
    tx = jf.distributed_optimizer(optax.adam(1e-3))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {f"layer_{i}": {"scale": jnp.ones(16), "bias": jnp.zeros(16)} for i in range(LAYERS)}
    state = {"params": params, "opt": tx.init(params)}
    rows = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    step = jf.distribute(train_step, example=(state, rows), strategy="collective")
    assert isinstance(step, jf.Step)
    state, _ = step(state, rows)  # the returned state is already in place for the next call
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    batch = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("devices")))
    raw, again = (Side(step.compiled, state, batch) for _ in range(2))
    times = compare(raw, Side(step, state, batch, waits=devices > 1), again, plan)
    where = f"{2 * LAYERS} parameters on {devices} devices"
    shown = (f"{times.baseline_ms:.2f}", f"{times.candidate_ms:.2f}", f"{times.ratio:.3f}")
    print_table(HEADS, [(where, *shown, "{:.3f} to {:.3f}".format(*times.itself))])
    return [Bar(f"{where}: step() over the raw call", times.ratio, 1.05, times.spread)]


def loss(params: Any, batch: jax.Array) -> jax.Array:
    outputs = (batch * layer["scale"] + layer["bias"] for layer in params.values())
    return jnp.stack([(output**2).mean() for output in outputs]).mean()


if __name__ == "__main__":
    run("call_overhead", __file__, measure, device_counts=(1,))
