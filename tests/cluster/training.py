"""The ranks' script of tests: several training runs, one after another.

`python training.py FOLDER NAME...` writes, for each, the state and metrics after its last step.
"""

import sys
import warnings
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.cluster import RankPlace
from jaxfleet.errors import CheckpointError
from tests.collective import models
from tests.collective.test_merge import EVERY
from tests.runtime import toys

STEPS = 20
ROWS = 16
WIDTH = 12


def begin(tx: optax.GradientTransformation) -> Any:
    """Returns a state with every kind of value: also a random key and a counter."""
    first, last = jax.random.split(jax.random.key(3))
    params = {
        "first": jax.random.normal(first, (toys.FEATURES, WIDTH)) / 3,
        "last": jax.random.normal(last, (WIDTH,)) / 3,
    }
    return {"params": params, "opt": tx.init(params), "key": jax.random.key(5), "steps": 0}


def noisy(tx: optax.GradientTransformation) -> toys.TrainStep:
    """Returns a step with dropout, a norm over all gradients, and metrics of every kind."""

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, now = jax.random.split(state["key"])

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            kept = jax.random.bernoulli(now, 0.8, (batch["x"].shape[0], WIDTH))
            hidden = jnp.tanh(batch["x"] @ params["first"]) * kept
            errors = hidden @ params["last"] - batch["y"]
            return jnp.square(errors).mean(), errors

        (value, errors), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "errors": errors, "small": (jnp.abs(errors) < 0.3).sum()}
        return {"params": params, "opt": opt, "key": key, "steps": state["steps"] + 1}, metrics

    return train_step


def clipped() -> optax.GradientTransformation:
    """Returns an optimizer that needs all gradients at once."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))


def whole_batches(place: RankPlace) -> Any:
    """Trains on whole batches; each rank except 0 begins with another state."""
    tx = jf.distributed_optimizer(clipped())
    state, metrics = begin(tx), None
    step = jf.distribute(noisy(tx), (state, toys.rows(ROWS)))
    chosen = [
        "exchange=true" in str(op) for op in step.program.root.ops if "allreduce_sum" in op.type
    ]
    assert chosen == [place.size * jax.local_device_count() <= 4] * len(chosen) != [], chosen
    if place.rank:
        state["params"] = jax.tree.map(lambda x: x + 3, state["params"])
        state["key"] = jax.random.key(place.rank)
    for number in range(STEPS):
        state, metrics = step(state, toys.rows(ROWS, seed=number))
    if place.rank == 0:  # a rank may query alone
        told = step.evaluate(lambda s, x: x @ s["params"]["first"], state, toys.rows(5)["x"])
        first = np.asarray(state["params"]["first"].addressable_data(0))
        np.testing.assert_allclose(told, toys.rows(5)["x"] @ first, rtol=1e-5, atol=1e-6)
    return state, metrics


def one_process() -> Any:
    """Returns the result of one device on the same batches."""
    train_step, state, metrics = jax.jit(noisy(clipped())), begin(clipped()), None
    for number in range(STEPS):
        state, metrics = train_step(state, toys.rows(ROWS, seed=number))
    return state, metrics


def own_rows(place: RankPlace) -> Any:
    """Trains on local rows; errors come back for these rows."""
    tx = jf.distributed_optimizer(optax.adam(0.1))
    strategy = jf.DistributedStrategy(batch="local")
    count = ROWS // place.size
    mine = slice(place.rank * count, (place.rank + 1) * count)
    state, batch = toys.start(tx), jax.tree.map(lambda x: x[mine], toys.rows(ROWS))
    step, metrics = jf.distribute(toys.training(tx), (state, batch), strategy), None
    for _ in range(STEPS):
        state, metrics = step(state, batch)
    return state, metrics


def left_out(place: RankPlace) -> Any:
    """Trains with a batch in which rank 1's rows have no finite gradient, which is reported."""
    step, state = toys.distributed(jf.DistributedStrategy(on_nonfinite="skip"))
    bad = toys.rows(ROWS)
    bad["y"][-1] = np.nan
    metrics: Any = None
    with warnings.catch_warnings(record=True) as caught, step:
        warnings.simplefilter("always")
        for number in range(STEPS + 1):
            state, metrics = step(state, bad if number == 2 else toys.rows(ROWS))
    told = [str(x.message) for x in caught if "at step 3" in str(x.message)]
    assert len(told) == (1 if place.rank == 0 else 0), told
    return state, metrics


def saved(folder: Path, place: RankPlace) -> Any:
    """Trains, saves, continues, and continues again from the checkpoint."""
    step, state = toys.distributed(jf.DistributedStrategy())
    for _ in range(STEPS // 2):
        state, _ = step(state, toys.rows(ROWS))
    step.save(folder / "saved", state, number=STEPS // 2)
    state, _ = step(state, toys.rows(ROWS))
    step.save(folder / "other", state, number=STEPS // 2)
    refuse_another(step, folder, place)
    state, metrics = step.restore(folder / "saved"), None
    for _ in range(STEPS // 2):
        state, metrics = step(state, toys.rows(ROWS))
    return state, metrics


def refuse_another(step: Any, folder: Path, place: RankPlace) -> None:
    """Fails unless ranks reject checkpoints of a single rank, even of the same step."""
    home = folder / f"of rank {place.rank}"
    home.mkdir()
    (home / "saved").symlink_to(folder / ("saved" if place.rank else "other"))
    mixed = pytest.raises(CheckpointError, match=f"found that of step {STEPS // 2}, ")
    with chdir(home), mixed:
        step.restore("saved")


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("adam", {"sharded": True}),
    "hierarchical": ("clipped", {"hierarchical": 2}),
    "local_sgd, k=1": ("sgd", {"communication": "local_sgd", "k_steps": 1}),
    "local_sgd, k=4": ("adam", {"communication": "local_sgd", "k_steps": 4}),
    "merge": ("momentum", {"merge": EVERY}),
}
"""Ways for ranks to go together: an optimizer of `models`, and what its strategy says."""


def in_a_way(name: str, folder: Path) -> Any:
    """Trains in one mode; returns parameters, loss, and bytes of the optimizer's state here."""
    optimizer, options = WAYS[name]
    step, state = models.distributed(optimizer, jf.DistributedStrategy(**options))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt))
    metrics: Any = None
    for number in range(STEPS):
        state, metrics = step(state, models.batch(number))
        if number == STEPS // 2:
            step.save(folder / name, state)
            state = step.restore(folder / name)
    if name == "sharded":
        jax.tree.map(np.asarray, step.pull(state))  # jax itself would refuse parts of other ranks
    held = [leaf for leaf in jax.tree.leaves(state.opt) if isinstance(leaf, jax.Array)]
    here = sum(shard.data.nbytes for leaf in held for shard in leaf.addressable_shards)
    return state.params, metrics, np.asarray([here, whole])


def leaves(tree: Any) -> list[np.ndarray]:
    """Returns the leaves on the host, random keys as their data."""
    return [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in jax.tree.leaves(tree)]


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value.dtype, np.dtype)


def main(folder: Path) -> None:
    """Joins, trains in every mode, and writes the results."""
    place = jf.initialize(connect_s=60.0)
    (folder / "devices").write_text(str(jax.device_count()))
    trainings: dict[str, Callable[[], Any]] = {
        "whole batches": lambda: whole_batches(place),
        "left out": lambda: left_out(place),
        "own rows": lambda: own_rows(place),
        "saved": lambda: saved(folder, place),
    }
    ways = [name for name in WAYS if name != "hierarchical" or jax.device_count() > 2]
    trainings.update((name, partial(in_a_way, name, folder)) for name in ways)
    for name, train in trainings.items():
        np.savez(folder / f"{name}-{place.rank}.npz", *leaves(train()))
        sys.stdout.write(f"{name}: done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
