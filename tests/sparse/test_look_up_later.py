"""Lookups between steps, and rows without gradients in a step with more gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, FeedError, ProgramError

table = jf.embedding_table("words", 2, optimizer=jf.tables.Sgd(0.5))
tx = jf.distributed_optimizer(optax.sgd(0.5))


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> jax.Array:
        return (table(params["words"], batch["ids"]) * batch["x"][:, None]).sum()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def test_they_are_as_the_last_step_left_them_in_any_shape() -> None:
    params = {"words": table.init()}
    state = {"params": params, "opt": tx.init(params)}
    ids = np.array([2**62, -5, 2**62])
    batch = {"ids": ids, "x": np.ones(3, np.float32)}
    step = jf.distribute(train_step, example=(state, batch), strategy="single")
    assert isinstance(step, jf.Step)
    before = step.look_up("words", [[-5, 2**62], [7, 7]])
    assert before.shape == (2, 2, 2)
    np.testing.assert_array_equal(before[1, 0], before[1, 1])
    step(state, batch)
    after = step.look_up("words", [[-5, 2**62], [7, 7]])
    moved = np.array([[0.5, 1.0], [0.0, 0.0]], np.float32)[..., None]  # -5 once, 2**62 twice
    np.testing.assert_array_equal(after, before - moved)
    assert step.look_up("words", np.empty((0, 3), np.int64)).shape == (0, 3, 2)


def test_a_step_that_trains_no_table_keeps_none_of_its_rows() -> None:
    """No push would evict them, whatever the table's capacity is."""
    words = jf.embedding_table("words", 2, evictions=jf.tables.Capacity(1 << 16))

    def total(handle: Any, batch: Any) -> tuple[Any, Any]:
        return handle, words(handle, batch["ids"]).sum()

    state, batch = words.init(), {"ids": np.arange(4)}
    step = jf.distribute(total, (state, batch), jf.DistributedStrategy(mode="single"))
    state, found = step(state, batch)
    np.testing.assert_allclose(found, step.look_up("words", batch["ids"]).sum(), rtol=1e-6)
    assert step.stats()["tables"]["words"]["rows"] == 0


def test_what_is_no_key_is_refused() -> None:
    params = {"words": table.init()}
    state = {"params": params, "opt": tx.init(params)}
    batch = {"ids": np.zeros(3, np.int64), "x": jnp.ones(3)}
    step = jf.distribute(train_step, example=(state, batch), strategy="single")
    assert isinstance(step, jf.Step)
    with pytest.raises(FeedError, match="keys of table 'words'"):
        step.look_up("words", [1.5])
    masked = np.ma.masked_equal(np.arange(3), 1)
    with pytest.raises(FeedError, match="'batch/ids' is fed a masked array"):
        step(state, {**batch, "ids": masked})
    with pytest.raises(ProgramError, match="no table 'word' in this step, which has words"):
        step.look_up("word", [1])


def test_rows_of_a_dense_table_are_said_to_be_a_parameter() -> None:
    words = jf.embedding_table("words", 2, rows=8)

    def step_of(state: Any, batch: Any) -> tuple[Any, Any]:
        return state, words(state["params"]["words"], batch["ids"]).sum()

    state, batch = {"params": {"words": words.init()}}, {"ids": np.zeros(3, np.int64)}
    step = jf.distribute(step_of, example=(state, batch), strategy="single")
    assert isinstance(step, jf.Step)
    with pytest.raises(ProgramError, match="no table 'words' in this step, which has none") as no:
        step.look_up("words", [1])
    assert "a dense table is none but a parameter" in no.value.__notes__[0]


def loss_of(params: Any, batch: Any) -> jax.Array:
    return (table(params["words"], batch["ids"]) * params["w"]).sum()


def updated(params: Any, opt: Any, batch: Any) -> tuple[Any, Any, Any]:
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss


def test_what_else_is_differentiated_trains_no_rows() -> None:
    def logged(state: Any, batch: Any) -> tuple[Any, Any]:
        other = jax.grad(lambda params: 100 * loss_of(params, batch))(state["params"])
        params, opt, loss = updated(state["params"], state["opt"], batch)
        return {"params": params, "opt": opt}, {"loss": loss, "w": other["w"]}

    step, state, batch = started(logged)
    before = step.look_up("words", [1, 2])
    step(state, batch)
    moved = np.array([[0.5], [1.0]], np.float32)  # 2 occurs twice
    np.testing.assert_array_equal(step.look_up("words", [1, 2]), before - moved)


def test_two_updates_of_a_table_in_a_step_are_refused() -> None:
    def twice(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt, _ = updated(state["params"], state["opt"], batch)
        params, opt, loss = updated(params, opt, batch)
        return {"params": params, "opt": opt}, loss

    with pytest.raises(CaptureError, match="'words' is trained by two updates in a step"):
        started(twice)


def started(train_step: Any) -> tuple[jf.Step, Any, Any]:
    params = {"words": table.init(), "w": jnp.ones(2)}
    state, batch = {"params": params, "opt": tx.init(params)}, {"ids": np.array([1, 2, 2])}
    step = jf.distribute(train_step, example=(state, batch), strategy="single")
    assert isinstance(step, jf.Step)
    return step, state, batch
