"""Runs many steps on emulated devices, with typical actions of a user between them.

Run by test_no_deadlock.py, each time in a new process. A hang prints its location.
"""

import argparse
import faulthandler
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf

FEATURES, WIDTH, ROWS_A_DEVICE = 16, 32, 4
Between = Callable[[Any, Any], None]


def make() -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any]:
    """Returns the training step of a small net, and its state."""
    tx = jf.distributed_optimizer(optax.adam(1e-3))
    key = jax.random.key(0)
    params = {"in": jax.random.normal(key, (FEATURES, WIDTH)) / 4, "out": jnp.zeros((WIDTH, 1))}

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return train_step, {"params": params, "opt": tx.init(params)}


def loss(params: Any, x: jax.Array) -> jax.Array:
    """Returns the net's loss in predicting the sign of each row's sum."""
    found = jnp.tanh(x @ params["in"]) @ params["out"]
    return jnp.square(found[:, 0] - jnp.sign(x.sum(axis=1))).mean()


def nothing(step: jf.Step, rows: Any) -> Between:
    """Does not wait: the next step follows at once."""
    return lambda _state, _value: None


def evaluation(step: jf.Step, rows: Any) -> Between:
    """Starts the user's own jitted evaluation on rows sharded over the devices, without waiting."""
    mesh = Mesh(np.array(step.devices), ("users",))
    cut = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("users")))
    evaluate = jax.jit(loss)
    running: list[jax.Array] = []

    def between(state: Any, _: Any) -> None:
        running[2:] = [evaluate(state["params"], cut), evaluate(state["params"], rows)]

    return between


def checkpoint(step: jf.Step, rows: Any) -> Between:
    """Reads everything back to the host."""

    def between(state: Any, value: Any) -> None:
        assert np.isfinite(np.asarray(value))
        jax.device_get(state)

    return between


def another_step(step: jf.Step, rows: Any) -> Between:
    """Alternates with a second step, with its own state."""
    train_step, state = make()
    second = jf.distribute(train_step, example=(state, rows))
    held = [state]

    def between(_: Any, __: Any) -> None:
        held[0], _ = second(held[0], rows)

    return between


KINDS = (nothing, evaluation, checkpoint, another_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--between", choices=[kind.__name__ for kind in KINDS], required=True)
    parser.add_argument("--deadline-s", type=float, required=True)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.deadline_s, exit=True)
    jf.emulate_devices(args.devices)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(ROWS_A_DEVICE * args.devices, FEATURES)).astype(np.float32)
    train_step, state = make()
    step = jf.distribute(train_step, example=(state, rows))
    assert isinstance(step, jf.Step)
    (between,) = [kind(step, rows) for kind in KINDS if kind.__name__ == args.between]
    state, first = step(state, rows)
    for _ in range(args.steps - 1):
        state, last = step(state, rows)
        between(state, last)
    assert last < first
    sys.stdout.write(f"{args.steps} steps on {len(step.devices)} devices\n")


if __name__ == "__main__":
    main()
