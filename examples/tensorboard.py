"""Train on scikit-learn's handwritten digits, and write every tenth step's metrics for TensorBoard.

    pip install 'jaxfleet[examples,metrics]' tensorboard
    python examples/tensorboard.py --folder runs/one
    jaxfleet launch --nproc 2 examples/tensorboard.py --folder runs/two
    tensorboard --logdir runs

Line (1) is all that it takes; of several processes the first writes. It takes some seconds; the
last line is `accuracy 0.9xx at step 140; the metrics of 14 steps are in runs/one`.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxfleet as jf

BATCH_ROWS = 128


def train(args: argparse.Namespace) -> None:
    jf.initialize()
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16).astype(np.float32), labels.astype(np.int32)
    tx = jf.distributed_optimizer(optax.adam(1e-2))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = batch["x"] @ params["w"] + params["b"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), (logits.argmax(-1) == batch["y"]).mean()

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "train": {"accuracy": accuracy, "norm": optax.global_norm(grads)}}
        return {"params": params, "opt": opt}, metrics

    params = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    state = {"params": params, "opt": tx.init(params)}
    random = np.random.default_rng(0)
    example = (state, {"x": x[:BATCH_ROWS], "y": y[:BATCH_ROWS]})
    with jf.distribute(train_step, example=example) as step:
        step.log_to(args.folder, every=10)  # (1)
        for _ in range(args.steps):
            rows = random.permutation(len(x))[:BATCH_ROWS]
            state, metrics = step(state, {"x": x[rows], "y": y[rows]})
    if jf.is_first():
        accuracy, count = float(metrics["train"]["accuracy"]), args.steps // 10
        said = f"accuracy {accuracy:.3f} at step {args.steps}"
        print(f"{said}; the metrics of {count} steps are in {args.folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on digits, with metrics for TensorBoard.")
    parser.add_argument("--folder", default="runs/digits", help="where the metrics go")
    parser.add_argument("--steps", type=int, default=140)
    train(parser.parse_args())
