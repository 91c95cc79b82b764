"""`explain` reports a job's mode: all choices of the user, and the staleness bound."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.runtime.pserver_job import explain_job
from jaxfleet.runtime.simulated_job import Twin
from tests.modes.linear import batch, start, twin


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("sync", {}, ["communication sync", "waits for servers 1 time"]),
        ("async", {"merge": 3, "staleness": 5}, ["up to 3 (merge)", "staleness 5", "up to 6 "]),
        ("half_async", {"merge": 3}, ["of 3 steps (merge)", "staleness 12"]),
        ("dc_asgd", {"delay_compensation": 0.25}, ["0.25 g g (w - w')", "staleness 4"]),
        ("geo", {"k_steps": 6}, ["every 6 steps (k_steps)", "1/2 of", "staleness 24"]),
        ("fl", {"k_steps": 6}, ["every 6 steps (k_steps)", "at most 5 steps old"]),
    ],
)
def test_it_says_the_mode_and_its_bound(how: str, options: Any, said: list[str]) -> None:
    job = twin(how, trainers=2, **options)
    text = explain_job(job.captured, job.strategy, job.programs())
    for words in (f"communication {how}:", *said):
        assert words in text
    assert ("a step waits for servers" in text) == (how == "sync")


def in_a_loop(w: Any, x: Any) -> Any:
    def turn(total: Any, _: Any) -> Any:
        return jnp.sum(jnp.tanh(total + x @ w)), None

    return jax.lax.scan(turn, jnp.float32(0), None, length=2)[0]


def on_a_diagonal(w: Any, x: Any) -> Any:
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax((x * w) @ x.T)))


@pytest.mark.parametrize(
    ("loss", "said"),
    [(in_a_loop, "inside 'scan' ("), (on_a_diagonal, "inside a branch for each platform (")],
)
def test_it_says_why_and_where_a_batch_is_not_divided(loss: Any, said: str) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def train_step(state: Any, data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["w"], data["x"])
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value

    strategy = jf.DistributedStrategy(mode="pserver", min_block_size=2)
    job = Twin(train_step, (start(), batch(0)), strategy, servers=1, trainers=2)
    text = explain_job(job.captured, job.strategy, job.programs())
    assert "; 1 server\n" in text
    assert f"every trainer computes the whole batch: values of all rows are needed {said}" in text
    assert "test_explain.py:" in text.partition(said)[2].partition(")")[0]


def test_rows_of_tables_and_gathered_rows_are_among_the_bytes() -> None:
    items = jf.embedding_table("items", 8)
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def train_step(state: Any, data: Any) -> Any:
        def loss(params: Any) -> Any:
            rows = items(params["items"], data["ids"]).mean(1)
            first = jax.lax.slice_in_dim(data["x"], 0, 3)  # whole on every trainer
            return jnp.square(rows @ params["w"]).mean() + jnp.square(first @ params["w"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {"items": items.init(), "w": jnp.ones(8)}
    ids = np.arange(32, dtype=np.int64).reshape(8, 4)
    state = {"params": params, "opt": tx.init(params)}
    data = {"ids": ids, "x": np.ones((8, 8), np.float32)}
    job = Twin(train_step, (state, data), servers=2, trainers=2)
    text = explain_job(job.captured, job.strategy, job.programs())
    assert (
        "all-gathers: 1 over all trainers, 128 bytes sent and 256 received by each trainer" in text
    )
    assert (
        "table 'items': each trainer sends at most 16 keys of 8 bytes and receives 512 bytes of "
        "rows; gradients as large go back"
    ) in text
    assert "not counted" not in text


def test_every_trainer_computing_whole_slices_is_said_with_the_line() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def train_step(w: Any, data: Any) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.square(data["x"][:3] @ w).mean())(w)
        updates, _ = tx.update(grads, tx.init(w), w)
        return optax.apply_updates(w, updates), value

    job = Twin(train_step, (jnp.ones(8), {"x": np.ones((8, 8), np.float32)}), trainers=2)
    text = explain_job(job.captured, job.strategy, job.programs())
    assert "every trainer computes the whole batch: the slice takes some rows of the batch" in text
    assert "rows on each" not in text
