"""Train a click model whose embedding table has keys out of 10^9 for each of 26 slots.

    python examples/ctr.py
    jaxfleet launch --servers 2 --trainers 2 examples/ctr.py --mode pserver
    jaxfleet launch --servers 2 --trainers 2 examples/ctr.py --mode pserver --communication async
    jaxfleet launch --servers 2 --trainers 1:2 examples/ctr.py --mode pserver --on-lost continue

Of the last launch, `jaxfleet scale --trainers 4` changes the number of trainers while it runs.

The clicks are drawn from a planted truth: every key has its own weight, and a click's odds are the
sum of 26 of them. So the AUC has a ceiling, that of the truth itself, which is printed beside the
model's. Keys are as rare as real ones, by a zipf law of exponent 1.2: most of those in the test
rows never occurred in training, so no model can know their weights. The reachable AUC is printed
too: that of the truth with 0 for keys that training had fewer than five times.

The last line is `test AUC 0.74x, ...`, in about two minutes.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.metrics import roc_auc_score

import jaxfleet as jf

SLOTS, RANKS, EXPONENT = 26, 10**9, 1.2
DIM, HIDDEN = 8, (64, 32)
MIX = np.uint64(0x9E3779B97F4A7C15)

# The gradient of a mean over a thousand rows is small beside Adagrad's initial 0.1.
table = jf.embedding_table(
    "slots",
    DIM,
    initializer=jf.tables.Uniform(-0.01, 0.01),
    optimizer=jf.tables.Adagrad(0.1, initial=0.0, epsilon=1e-12),
)
tx = jf.distributed_optimizer(optax.adagrad(0.05))


@dataclass(frozen=True)
class Clicks:
    """Rows: `keys` int64[n, 26], `clicked` float32[n], and the planted `odds` float64[n]."""

    keys: np.ndarray
    clicked: np.ndarray
    odds: np.ndarray


def draw(rows: int, seed: int) -> Clicks:
    """Draws rows; the truth does not depend on the seed."""
    random = np.random.default_rng(seed)
    ranks = random.zipf(EXPONENT, (rows, SLOTS))
    while (beyond := ranks > RANKS).any():
        ranks[beyond] = random.zipf(EXPONENT, int(beyond.sum()))
    keys = mixed(ranks.astype(np.uint64) * np.uint64(SLOTS) + np.arange(SLOTS, dtype=np.uint64))
    odds = weights(keys).sum(1) - 1.0
    clicked = random.random(rows) < 1 / (1 + np.exp(-odds))
    return Clicks(keys.view(np.int64), clicked.astype(np.float32), odds)


def mixed(values: np.ndarray) -> np.ndarray:
    """Hashes values to uint64 keys over the whole range."""
    values = (values ^ (values >> np.uint64(31))) * MIX
    return values ^ (values >> np.uint64(29))


def weights(keys: np.ndarray) -> np.ndarray:
    """Returns the planted weight of each key, uniform in [-0.5, 0.5)."""
    return (mixed(keys.view(np.uint64)) >> np.uint64(11)) * 2.0**-53 - 0.5


def learnable(train: Clicks, test: Clicks) -> float:
    """Returns the AUC of the truth without keys that training had fewer than five times."""
    keys, counts = np.unique(train.keys, return_counts=True)
    known = np.isin(test.keys, keys[counts >= 5])
    return auc(test.clicked, (weights(test.keys) * known).sum(1))


def auc(clicked: np.ndarray, odds: np.ndarray) -> float:
    return float(roc_auc_score(clicked, odds))


def logits_of(params: Any, vectors: jax.Array) -> jax.Array:
    x = vectors.reshape(vectors.shape[0], SLOTS * DIM)
    for layer in params["layers"][:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return (x @ params["layers"][-1]["w"] + params["layers"][-1]["b"])[:, 0]


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    def loss_of(params: Any) -> jax.Array:
        logits = logits_of(params, table(params["slots"], batch["keys"]))
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def start(seed: int) -> Any:
    sizes = (SLOTS * DIM, *HIDDEN, 1)
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    layers = [
        {"w": jax.random.normal(key, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)}
        for key, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]
    params = {"slots": table.init(), "layers": layers}
    return {"params": params, "opt": tx.init(params)}


def batches(rows: Clicks, size: int) -> Iterator[dict[str, np.ndarray]]:
    for at in range(0, len(rows.clicked) - size + 1, size):
        yield {"keys": rows.keys[at : at + size], "clicked": rows.clicked[at : at + size]}


def predict(step: Any, state: Any, keys: np.ndarray) -> np.ndarray:
    """Returns the odds of rows; their embeddings come from the table, wherever it is."""
    return np.asarray(jax.jit(logits_of)(state["params"], step.look_up("slots", keys)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a click model with a huge table.")
    parser.add_argument("--mode", default="single", help="single, collective or pserver")
    parser.add_argument("--communication", default="sync", help="how pserver trainers update")
    parser.add_argument("--on-lost", default="fail", help="without a trainer: fail or continue")
    parser.add_argument("--devices", type=int, default=4, help="collective: how many to emulate")
    parser.add_argument("--rows", type=int, default=400_000, help="to train on")
    parser.add_argument("--batch", type=int, default=1024, help="rows of a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jf.emulate_devices(args.devices)
    train, test = draw(args.rows, args.seed + 1), draw(40_000, args.seed + 2)
    state = start(args.seed)
    strategy = jf.DistributedStrategy(
        mode=args.mode, communication=args.communication, on_trainer_lost=args.on_lost
    )
    example = (state, next(batches(train, args.batch)))
    with jf.distribute(train_step, example=example, strategy=strategy) as step:
        state, done = step.resume(state)  # a process that joins goes on with the others
        for number, batch in enumerate(batches(train, args.batch), 1):
            if number <= done:
                continue
            state, metrics = step(state, batch)
            if number % 50 == 0:
                print(f"step {number}, loss {float(metrics['loss']):.4f}", flush=True)
        found = auc(test.clicked, predict(step, step.pull(state), test.keys))
    print(f"rows of the test {len(test.clicked)}, clicked {test.clicked.mean():.3f}")
    reachable, ceiling = learnable(train, test), auc(test.clicked, test.odds)
    print(f"test AUC {found:.3f}, of the truth that is known {reachable:.3f}, of all {ceiling:.3f}")


if __name__ == "__main__":
    main()
