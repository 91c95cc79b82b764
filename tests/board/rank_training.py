"""A script of ranks whose last one takes longer for its own part of a step, for the board."""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxfleet as jf


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.05, help="of the last rank at each step")
    parser.add_argument("--save", type=Path, required=True, help="before the last ten steps")
    args = parser.parse_args()
    jf.initialize()
    tx = jf.distributed_optimizer(optax.sgd(0.01))

    def train_step(state: tuple, batch: jax.Array) -> tuple:  # type: ignore[type-arg]
        weights, opt = state
        loss, grads = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(weights)
        updates, opt = tx.update(grads, opt, weights)
        return (optax.apply_updates(weights, updates), opt), {"loss": loss}

    weights, batch = jnp.ones(4), jnp.ones((8, 4))
    state = weights, tx.init(weights)
    step = jf.distribute(train_step, example=(state, batch), strategy="collective")
    for number in range(1, args.steps + 1):
        state, metrics = step(state, batch)
        if jf.rank() == jf.size() - 1:
            time.sleep(args.pause)
        if number == args.steps - 10:
            step.save(args.save, state)
            print(f"saved at {time.time()}", flush=True)  # noqa: T201
    print(f"trained {number} steps to {float(metrics['loss'])!r}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
