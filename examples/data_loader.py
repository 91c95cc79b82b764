"""Train on scikit-learn's handwritten digits, save in the middle of an epoch, and go on.

    python examples/data_loader.py
    jaxfleet launch --servers 1 --trainers 2 examples/data_loader.py --mode pserver

Each step reads 96 of 1,437 images, in an order that the seed and the step determine; a process
reads its own rows of them. The script trains half of the steps and saves. It then restores the
state and reads the samples that were left, as a job of another size would. The last line is
`test accuracy 0.936` in every mode.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxfleet as jf

BATCH_ROWS = 96


def shifted(sample: Any, random: np.random.Generator) -> Any:
    """Moves an image by up to one pixel."""
    moves = random.integers(-1, 2, size=2)
    return {**sample, "x": np.roll(sample["x"], moves, axis=(0, 1))}


def logits(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with a restartable loader.")
    parser.add_argument("--mode", default="collective", help="the strategy's name")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("digits-checkpoint"))
    args = parser.parse_args()
    jf.initialize()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    x, x_test, y, y_test = train_test_split(
        images, labels.astype(np.int32), test_size=360, random_state=0, stratify=labels
    )
    loader = jf.data.Loader(
        {"x": x, "y": y}, BATCH_ROWS, seed=args.seed, epochs=args.epochs, augment=shifted,
        batch="local",
    )  # fmt: skip

    tx = jf.distributed_optimizer(optax.adam(1e-2))

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            each = optax.softmax_cross_entropy_with_integer_labels(
                logits(params, batch["x"]), batch["y"]
            )
            return each.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    keys = jax.random.split(jax.random.key(args.seed))
    params = {
        "w1": 0.1 * jax.random.normal(keys[0], (64, 128)),
        "b1": jnp.zeros(128),
        "w2": 0.1 * jax.random.normal(keys[1], (128, 10)),
        "b2": jnp.zeros(10),
    }
    state: Any = {"params": params, "opt": tx.init(params)}
    strategy = jf.DistributedStrategy(mode=args.mode, batch="local")
    with jf.distribute(train_step, example=(state, loader[0]), strategy=strategy) as step:
        with loader.from_step(0) as batches:
            while batches.step < len(loader) // 2:
                state, loss = step(state, next(batches))
            step.save(args.checkpoint, state, data=batches.state())
        if jf.is_first():
            print(f"saved after {len(loader) // 2} of {len(loader)} steps: loss {loss:.4f}")

        state = step.restore(args.checkpoint)
        for batch in loader.from_checkpoint(args.checkpoint):
            state, loss = step(state, batch)
        trained = step.pull(state)["params"]
    if jf.is_first():
        print(f"trained {len(loader)} steps: loss {loss:.4f}")
        correct = logits(trained, jnp.asarray(x_test)).argmax(-1) == y_test
        print(f"test accuracy {correct.mean():.3f}")


if __name__ == "__main__":
    main()
