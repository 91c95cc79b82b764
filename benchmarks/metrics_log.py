"""Overhead of `step.log_to(folder)` on a step with ten scalar metrics.

    python benchmarks/metrics_log.py [--quick]

Both sides run the same step on one device, of about half a millisecond; one writes its metrics to
an event file of TensorBoard, every tenth step or each. The bars are 1.05 times the step without a
log for every tenth, and 1.40 for each, plus the spread of the step against itself.
"""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Bar, Plan, Side, compare, print_table, run

import jaxfleet as jf

WIDTH = 256
HEADS = ("", "step(), ms", "logged, ms", "ratio", "step/itself")


def measure(devices: int, plan: Plan) -> list[Bar]:
    tx = jf.distributed_optimizer(optax.sgd(1e-3))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(lambda w: jnp.square(jnp.tanh(batch @ w)).mean())(state[0])
        updates, opt = tx.update(grads, state[1], state[0])
        norms = {f"power_{n}": jnp.linalg.norm(grads) ** n for n in range(9)}
        return (optax.apply_updates(state[0], updates), opt), {"loss": loss, "gradient": norms}

    weights = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    batch = jax.device_put(weights)
    params = jnp.asarray(weights)
    state = params, tx.init(params)

    def distributed() -> Any:
        return jf.distribute(train_step, example=(state, batch), strategy="single")

    bars = []
    with tempfile.TemporaryDirectory() as folder:
        for every, limit in ((10, 1.05), (1, 1.40)):
            step, logged, again = distributed(), distributed(), distributed()
            logged.log_to(folder, every=every)
            one, other, same = (Side(each, state, batch) for each in (step, logged, again))
            times = compare(one, other, same, plan)
            logged.close()
            where = f"metrics of every {every} steps, {devices} device"
            shown = (f"{times.baseline_ms:.3f}", f"{times.candidate_ms:.3f}", f"{times.ratio:.3f}")
            print_table(HEADS, [(where, *shown, "{:.3f} to {:.3f}".format(*times.itself))])
            bars.append(Bar(f"{where}: logged over not", times.ratio, limit, times.spread))
    return bars


if __name__ == "__main__":
    run("metrics_log", __file__, measure, device_counts=(1,))
