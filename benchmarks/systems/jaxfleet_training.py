"""A trainer of jaxfleet with servers: the job that chaos.py disturbs, on the task of this folder.

    jaxfleet launch --servers 2 --trainers 2 --save-every 25steps ... jaxfleet_training.py

There is no line about checkpoints but `step.resume`: the launch saves.
"""

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from systems import task

LABELS = {name: "counts" if name in task.COUNTS else "dense" for name in task.start()}
tx = jf.distributed_optimizer(
    optax.multi_transform(
        {"dense": optax.sgd(task.RATE, momentum=task.MOMENTUM), "counts": optax.sgd(1.0)}, LABELS
    )
)


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    params, opt = state

    def loss_fn(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["a"] + params["b"])
        logits = hidden @ params["c"] + params["d"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        for name in task.COUNTS:
            loss -= (jax.nn.one_hot(batch["at"], task.STEPS) @ params[name]).mean()
        return loss

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt = tx.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": loss}


def batch_of(number: int) -> dict[str, np.ndarray]:
    x, y = task.batch_of(number)
    return {"x": x, "y": y.astype(np.int32), "at": np.full(task.ROWS, number - 1, np.int32)}


def main() -> None:
    member = f"trainer-{jf.rank()}"
    task.report(member, "process", os.getpid())
    params = jax.tree.map(jnp.asarray, task.start())
    state: Any = (params, tx.init(params))
    strategy = jf.DistributedStrategy(
        mode="pserver", min_block_size=256, on_trainer_lost="wait", trainer_return_s=300.0
    )
    step = jf.distribute(train_step, example=(state, batch_of(1)), strategy=strategy)
    with step:
        state, number = step.resume(state)
        task.report(member, "restored", number)
        while number < task.STEPS:
            number += 1
            state, metrics = step(state, batch_of(number))
            np.asarray(metrics["loss"])
            task.report(member, "step", number)
            time.sleep(task.PAUSE_S)
        params, _ = step.pull(state)
    if jf.rank() == 0:
        task.finish({name: np.asarray(leaf) for name, leaf in params.items()})


if __name__ == "__main__":
    main()
