"""Lookups in Flax modules, and tables that stay dense."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxfleet as jf
from jaxfleet.capture.embedding.flax_modules import LinenEmbed, NnxEmbed
from jaxfleet.errors import CaptureError
from jaxfleet.tables.store import TableStore

TABLE = jf.embedding_table("items", 4, optimizer=jf.tables.Sgd(0.5))
BATCH = {"ids": np.array([[2**40, 1], [1, -5]]), "y": np.ones(2, np.float32)}


class Linen(linen.Module):
    """Sums rows."""

    @linen.compact
    def __call__(self, ids: Any) -> Any:
        return linen.Dense(1, use_bias=False)(LinenEmbed(TABLE)(ids).sum(1))[:, 0]


class Nnx(nnx.Module):
    """Sums rows."""

    def __init__(self) -> None:
        self.embed, self.out = NnxEmbed(TABLE), nnx.Linear(4, 1, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, ids: Any) -> Any:
        return self.out(self.embed(ids).sum(1))[:, 0]


def trained(params: Any, predict: Any) -> tuple[Any, list[float]]:
    """Trains a few steps in one process; returns the step and the losses."""
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            return jnp.mean((predict(params, batch["ids"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = jax.tree.map(jnp.copy, params)
    state = {"params": params, "opt": tx.init(params)}
    step: Any = jf.distribute(train_step, (state, BATCH), "single")
    losses = []
    for _ in range(5):
        state, loss = step(state, BATCH)
        losses.append(float(loss))
    return step, losses


def test_a_linen_module_looks_rows_up() -> None:
    model = Linen()
    params = model.init(jax.random.key(0), BATCH["ids"])
    step, losses = trained(params, model.apply)
    assert losses[-1] < losses[0] / 2
    assert len(step.tables.stores["items"]) == 3


def test_an_nnx_module_looks_rows_up() -> None:
    graph, params = nnx.split(Nnx())
    step, losses = trained(params, lambda params, ids: nnx.merge(graph, params)(ids))
    assert losses[-1] < losses[0] / 2
    assert len(step.tables.stores["items"]) == 3


def test_a_small_table_whose_rows_are_known_is_a_parameter() -> None:
    small = jf.embedding_table("small", 4, rows=100)
    rows = small.init()
    np.testing.assert_array_equal(rows, TableStore(small.spec).look_up(np.arange(100)))
    ids = jnp.array([[3, 4], [5, 3]])
    np.testing.assert_array_equal(small(rows, ids), np.asarray(rows)[np.asarray(ids)])
    step, losses = trained({"rows": rows}, lambda p, ids: small(p["rows"], ids % 100).sum((1, 2)))
    assert losses[-1] < losses[0]
    said = "table 'small' is a dense parameter, f32[100,4]: 1,600 bytes cost less than a look-up"
    assert said in step.explain()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "any int64 is a key"),
        ({"rows": 10**6}, "16,000,000 bytes cost more than a look-up"),
        ({"rows": 100, "optimizer": jf.tables.Sgd(0.5)}, "it has rules of its own"),
        ({"rows": 100, "dense": False}, "dense=False was given"),
        (
            {
                "admission": jf.tables.AfterCount(3, candidates=4096),
                "evictions": [jf.tables.Capacity(2048), jf.tables.Unseen(steps=7)],
            },
            "any int64 is a key",
        ),
    ],
    ids=["open", "large", "with an optimizer", "as told", "by rules"],
)
def test_other_tables_are_looked_up(options: Any, why: str) -> None:
    table = jf.embedding_table("t", 4, **options)
    assert table.init().shape == ()
    step, _ = trained({"t": table.init()}, lambda p, ids: table(p["t"], ids).sum((1, 2)))
    said = step.explain()
    assert f"looked up by key: {why}" in said
    rules = (
        "admission AfterCount(count=3, candidates=4096); eviction Capacity(rows=2048, policy=lru)"
    )
    assert (f"{rules}; eviction Unseen(steps=7)" in said) == ("admission" in options)


def test_a_table_that_cannot_be_dense_is_refused() -> None:
    with pytest.raises(CaptureError, match="how many rows it has must be given"):
        jf.embedding_table("t", 4, dense=True)
    with pytest.raises(CaptureError, match="no optimizer, admission or evictions must be given"):
        jf.embedding_table("t", 4, dense=True, rows=3, optimizer=jf.tables.Sgd())
    with pytest.raises(CaptureError, match="rows is 0"):
        jf.embedding_table("t", 4, rows=0)


def test_a_step_under_jit_and_checkpoint_trains_the_same_rows() -> None:
    def plain(params: Any, ids: Any) -> Any:
        return jnp.tanh(TABLE(params["t"], ids)).sum((1, 2))

    params = {"t": TABLE.init()}
    first, losses = trained(params, plain)
    again, recomputed = trained(params, jax.checkpoint(plain))
    jitted, compiled = trained(params, jax.jit(plain))
    assert losses == recomputed == compiled
    keys = np.unique(BATCH["ids"])
    rows = [step.tables.look_up("items", keys).tobytes() for step in (first, again, jitted)]
    assert rows[0] == rows[1] == rows[2]
    assert "jax.checkpoint does nothing where it holds a look-up" in again.explain()
    assert "jax.checkpoint" not in first.explain()
