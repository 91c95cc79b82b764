"""A small training script of two layers, for trainers and for the reference in one process.

Its steps take a while, so that a test can act in the middle.
"""

import argparse
import atexit
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.transport.messages import Kind

ROWS, INPUTS, HIDDEN, CLASSES = 16, 12, 16, 5
RATE = 0.05
COUNTING = ("count", "count_rows")
COUNTED = jf.embedding_table(
    "counted", 2, initializer=jf.tables.Constant(0.0), optimizer=jf.tables.Sgd(1.0)
)
KEYS = np.arange(-2, 2) << 40  # of its rows; every trainer has each at every step
USERS = jf.embedding_table("users", HIDDEN, optimizer=jf.tables.Adagrad(0.1))
IDS = np.arange(-9, 9) << 40  # of its rows; a batch has some of them
TRAINED = {"count_rows": (COUNTED.name, KEYS), "table": (USERS.name, IDS)}  # rows by kind


def optimizer(kind: str, rate: float) -> optax.GradientTransformation:
    """Returns the optimizer; a clipping one makes servers exchange norms."""
    if kind == "clip":
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    if kind == "clip_after":  # Adam's updates are exchanged
        return optax.chain(optax.adam(rate), optax.clip_by_global_norm(0.1))
    if kind == "clip_twice":  # not supported by servers, so trainers update
        clip = optax.clip_by_global_norm(0.1)
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate), clip)
    if kind in COUNTING:  # gradients are 1, so parameters count the updates
        return optax.sgd(1.0)
    return optax.adam(rate)


def forward(params: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns logits, and the batch statistics that normalize the hidden layer."""
    hidden = x @ params["a"] + params["b"]
    mean, variance = hidden.mean(0), hidden.var(0)
    hidden = jnp.tanh((hidden - mean) / jnp.sqrt(variance + 1e-3))
    return hidden @ params["c"] + params["d"], (mean, variance)


def make_step(kind: str, rate: float = RATE) -> Callable[[Any, Any], tuple[Any, Any]]:
    tx = jf.distributed_optimizer(optimizer(kind, rate))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt, running = state

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            if kind in COUNTING:
                total = sum(leaf.sum() for name, leaf in params.items() if name != "counted")
                if kind == "count_rows":
                    # Each of two trainers has each key twice in its half of the batch.
                    total = total + COUNTED(params["counted"], batch["counted"]).sum() / 2
                return total * jnp.isfinite(batch["x"]).mean(), running
            if kind == "norm":
                logits, statistics = forward(params, batch["x"])
            elif kind == "keys":  # a mask is drawn anew at every step
                drawn, following = jax.random.split(running[0])
                hidden = jnp.tanh(batch["x"] @ params["a"] + params["b"])
                kept = jax.random.bernoulli(drawn, 0.5, hidden.shape)
                logits = jnp.where(kept, hidden, 0.0) @ params["c"] + params["d"]
                statistics = following, running[1] + kept.sum()
            else:
                summed = batch["x"] @ params["a"] + params["b"]
                if kind == "table":
                    summed = summed + USERS(params["users"], batch["ids"]).sum(1)
                hidden = jnp.tanh(summed)
                logits, statistics = hidden @ params["c"] + params["d"], running
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), statistics

        (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        if kind == "norm":
            running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, running, statistics)
        return (optax.apply_updates(params, updates), opt, running), {"loss": loss}

    return train_step


def start(kind: str) -> Any:
    draw = np.random.default_rng(0)
    params = {
        "a": draw.normal(size=(INPUTS, HIDDEN)).astype(np.float32),
        "b": np.zeros(HIDDEN, np.float32),
        "c": draw.normal(size=(HIDDEN, CLASSES)).astype(np.float32),
        "d": np.zeros(CLASSES, np.float32),
    }
    if kind == "table":
        params["users"] = np.asarray(USERS.init())
    running: Any = (np.zeros(HIDDEN, np.float32), np.ones(HIDDEN, np.float32))
    if kind == "keys":
        running = jax.random.key(7), np.int32(0)
    if kind == "count_rows":
        params["counted"] = np.asarray(COUNTED.init())
    if kind in COUNTING:
        params = jax.tree.map(np.zeros_like, params)
    params, running = jax.tree.map(jnp.asarray, (params, running))
    return params, optimizer(kind, RATE).init(params), running


def batches(steps: int, kind: str = "plain", rows: int = 0) -> Iterator[Any]:
    draw, rows = np.random.default_rng(1), rows or ROWS
    for _ in range(steps):
        x = draw.normal(size=(rows, INPUTS)).astype(np.float32)
        batch = {"x": x, "y": draw.integers(0, CLASSES, rows).astype(np.int32)}
        if kind == "count_rows":
            batch["counted"] = np.tile(KEYS, rows // len(KEYS))
        yield batch | ({"ids": draw.integers(-9, 9, (rows, 3)) << 40} if kind == "table" else {})


def rows_of(step: Any, kind: str) -> dict[str, np.ndarray]:
    """Returns the rows of a step's table, if it has one."""
    return {"rows": step.look_up(*TRAINED[kind])} if kind in TRAINED else {}


def named(state: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): on_host(leaf) for path, leaf in leaves}


def strategy(args: argparse.Namespace) -> jf.DistributedStrategy:
    return jf.DistributedStrategy(
        mode="pserver",
        min_block_size=32,
        lost_after_s=args.lost_after,
        step_timeout_s=args.step_timeout,
        connect_s=args.connect,
        on_trainer_lost=args.on_lost,
        trainer_return_s=args.return_s,
        replay_bytes=args.replay_bytes,
        communication=args.communication,
        staleness=args.staleness,
        k_steps=args.k_steps,
        merge=args.merge,
        delay_compensation=args.compensation,
    )


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    kinds = ["plain", "clip", "clip_after", "clip_twice", "norm", "keys", "table", *COUNTING]
    parser.add_argument("--kind", default="plain", choices=kinds)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=0, help="of a batch")
    parser.add_argument("--look-up", action="store_true", help="the rows of a table at the end")
    parser.add_argument("--until", type=Path, help="a file that says which step is the last")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--without-with", action="store_true")
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--fork-at", type=int, default=-1)
    parser.add_argument("--lost-after", type=float, default=5.0)
    parser.add_argument("--step-timeout", type=float, default=6.0)
    parser.add_argument("--connect", type=float, default=30.0)
    parser.add_argument("--on-lost", default="fail")
    parser.add_argument("--return-s", type=float, default=30.0)
    parser.add_argument("--replay-bytes", type=int, default=1 << 20)
    parser.add_argument("--communication", default="sync")
    parser.add_argument("--staleness", type=int)
    parser.add_argument("--k-steps", type=int, default=10)
    parser.add_argument("--merge", type=int, default=1)
    parser.add_argument("--compensation", type=float, default=1.0)
    return parser.parse_args(words)


def fork_once() -> None:
    """Forks a child that runs its exit handlers, and waits for it."""
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # noqa: SLF001  # no public function runs only the handlers
        os._exit(0)  # the usual exit may wait for threads that a fork does not have
    os.waitpid(child, 0)


def main() -> None:
    """Trains, and writes the final state to a file."""
    args = arguments()
    state = start(args.kind)
    example = (state, next(batches(1, args.kind, args.rows)))
    train_step = make_step(args.kind, args.rate)
    print("begins.", flush=True)  # noqa: T201  # all is imported
    step: Any = jf.distribute(train_step, example=example, strategy=strategy(args))
    with nullcontext() if args.without_with else step:
        state, done = step.resume(state)
        for at, batch in enumerate(batches(args.steps, args.kind, args.rows), 1):
            if at <= done:
                continue
            if at == args.raise_at:
                raise RuntimeError("the script failed")
            if at == args.stop_at:
                break
            if args.until and args.until.exists() and at > int(args.until.read_text()):
                break
            if at == args.fork_at:
                fork_once()
            state, metrics = step(state, batch)
            print(f"step {at}. loss {metrics['loss']:.4f}", flush=True)  # noqa: T201
            time.sleep(args.pause)
        last = step.pull(state)
        out = args.out / f"result-{step.client.me.trainer}"
        rows = rows_of(step, args.kind) if args.kind == "count_rows" or args.look_up else {}
        np.savez(out, allow_pickle=False, **named(last), **rows)
        asked = [step.client.request(s, Kind.STATS) for s in range(len(step.server_programs))]
        step.client.wait(asked)
        stats = [dict(one.answer.body) for one in asked if one.answer is not None]
        out.with_suffix(".json").write_text(json.dumps(stats))
        own = step.stats()["trainer"]
        out.with_suffix(".trainer.json").write_text(json.dumps(own))


if __name__ == "__main__":
    main()
