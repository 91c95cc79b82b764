"""A user's `jf.fleet` script, run by every process of a job, or by a single one.

`python jax_script.py FOLDER` writes the losses and the final weights of the first worker there. A
second argument names a role maker; by default the environment specifies the role.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfleet import fleet
from jaxfleet.cluster import roles

STEPS = 6
HALF = STEPS // 2


def batch(number: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(8, 5)).astype(np.float32)
    return {"x": x, "y": x @ np.arange(5, dtype=np.float32)}


def train(folder: Path) -> tuple[list[float], Any]:
    """Trains, resuming from a checkpoint midway; returns the losses and the state."""
    tx = fleet.distributed_optimizer(optax.adam(0.1))

    def train_step(state: Any, rows: Any) -> tuple[Any, Any]:
        def loss_of(w: jax.Array) -> jax.Array:
            return jnp.square(rows["x"] @ w - rows["y"]).mean()

        loss, grad = jax.value_and_grad(loss_of)(state["w"])
        change, opt = tx.update(grad, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], change), "opt": opt}, {"loss": loss}

    w = jnp.zeros(5)
    state: Any = {"w": w, "opt": tx.init(w)}
    step = fleet.distribute(train_step, example=(state, batch(0)))
    if fleet.is_server():
        fleet.run_server()
        print("served", flush=True)  # noqa: T201
        sys.exit(0)
    losses = []
    for number in range(STEPS):
        if number == HALF:
            fleet.save(folder / "kept", state)
            state = fleet.restore(folder / "kept")
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return losses, step.pull(state)


def main() -> None:
    """Runs the role of the role maker."""
    folder, named = Path(sys.argv[1]), sys.argv[2:]
    fleet.init(getattr(roles, named[0])() if named else None)
    losses, state = train(folder)
    total = np.zeros(2, np.int64)
    fleet.all_reduce_worker(np.asarray([1, fleet.worker_index()]), total)
    fleet.barrier_worker()
    files = fleet.split_files(["a", "b", "c"])
    first = fleet.is_first_worker()
    fleet.stop_worker()
    print(f"worker {fleet.worker_index()} of {fleet.worker_num()}: {files}", flush=True)  # noqa: T201
    print(f"sums {total.tolist()}", flush=True)  # noqa: T201
    if first:
        np.savez(folder / "seen.npz", losses=losses, w=np.asarray(state["w"]))


if __name__ == "__main__":
    main()
