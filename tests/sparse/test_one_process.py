"""Tables in one process, on one device and on several, against a dense table in plain jax."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from tests.sparse.models import OPTIMIZERS, RATE, VALUES, batch_of, run_dense, sparse_job

# The dense run sums gradients of a row in the order of XLA's scatter over the whole table, and on
# several devices a sum over the batch is a sum of sums: some ULPs (6e-8) per step for values
# near 1, in ten steps.
TOLERANCE = 2e-6


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["single", "collective"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_rows_equals_training_the_dense_table(mode: str, optimizer: str) -> None:
    mine, dense = OPTIMIZERS[optimizer]
    job = sparse_job(mine)
    batches = [batch_of(seed) for seed in range(10)]
    step: Any = jf.distribute(job.train_step, (job.state, batches[0]), mode)
    state, losses = jax.tree.map(jnp.copy, job.state), []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    wanted, dense_losses = run_dense(job.table, dense, batches)
    np.testing.assert_allclose(losses, dense_losses, rtol=TOLERANCE)
    rows = step.tables.look_up("users", np.arange(VALUES))
    np.testing.assert_allclose(rows, wanted["users"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(state["params"]["w"], wanted["w"], rtol=TOLERANCE, atol=TOLERANCE)
    assert float(state["params"]["users"]) == 0.0


@pytest.mark.grid
def test_executables_are_as_many_as_powers_of_two_of_unique_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = sparse_job(jf.tables.Sgd(RATE))
    step: Any = jf.distribute(job.train_step, (job.state, batch_of(0)), "single")
    state = jax.tree.map(jnp.copy, job.state)
    counts = set()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for seed in range(40):
            batch = batch_of(seed, 64, values=1 + 8 * seed)
            counts.add(len(np.unique(np.concatenate([batch["ids"].ravel(), batch["item"]]))))
            state, _ = step(state, batch)
    said = [x.getMessage() for x in caplog.records]
    compiled = [x for x in said if x.startswith("Compiling jit(train_step)")]
    assert len(counts) > 30
    assert min(counts) <= 8
    assert max(counts) > 128
    assert len(compiled) == 6  # for 8, 16, 32, 64, 128 and 256 rows


def test_several_tables_have_no_executable_for_each_pair_of_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tables = {name: jf.embedding_table(name, 1) for name in ("left", "right")}
    tx = jf.distributed_optimizer(optax.sgd(RATE))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            return sum(table(params[name], batch[name]).sum() for name, table in tables.items())

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = {name: table.init() for name, table in tables.items()}
    state = {"params": params, "opt": tx.init(params)}
    batches = [
        {"left": np.arange(64) % left, "right": np.arange(64) % right}
        for left in (8, 64, 16, 32)
        for right in (64, 8, 32, 16)
    ]
    step: Any = jf.distribute(train_step, (state, batches[0]), "single")
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for batch in batches:
            state, _ = step(state, batch)
    said = [x.getMessage() for x in caplog.records]
    compiled = [x for x in said if x.startswith("Compiling jit(train_step)")]
    assert 1 < len(compiled) <= 1 + 2 * 3  # 8, 16, 32 and 64 rows of each; pairs are 16


def test_no_array_of_a_step_is_as_long_as_the_table() -> None:
    job = sparse_job(jf.tables.Sgd(RATE))
    step: Any = jf.distribute(job.train_step, (job.state, batch_of(0)), "single")
    state = jax.tree.map(jnp.copy, job.state)
    for seed in range(20):
        state, _ = step(state, batch_of(seed, 8, values=2**62))
    assert len(step.tables.stores["users"]) > 600
    known = [v.shape for block in step.program.blocks for v in block.variables.values()]
    largest = max(size for shape in known for size in shape if isinstance(size, int))
    assert largest <= 8
    assert step.memory_analysis().temp_size_in_bytes < 600 * 4 * 4


@pytest.mark.parametrize(
    "ids",
    [
        np.array([-(2**63), 2**63 - 1, 0, 0, -1, 1, 2**40, -(2**40)]),
        np.zeros(8, np.int64),
        np.arange(8, dtype=np.int8),
        np.arange(8, dtype=np.uint8),
        np.arange(8, dtype=np.uint64),
        np.arange(8, dtype=np.int32),
    ],
    ids=["any int64", "all equal", "int8", "uint8", "uint64", "int32"],
)
def test_keys_of_every_integer_dtype_and_value_have_their_rows(ids: np.ndarray) -> None:
    job = sparse_job(jf.tables.Sgd(RATE))
    batch = {"ids": np.stack([ids] * 3, 1), "item": ids, "y": np.ones(8, np.float32)}
    step: Any = jf.distribute(job.train_step, (job.state, batch), "single")
    step(jax.tree.map(jnp.copy, job.state), batch)
    assert len(step.tables.stores["users"]) == len(np.unique(ids))


def test_keys_may_be_of_another_integer_dtype_in_each_batch() -> None:
    job = sparse_job(jf.tables.Sgd(RATE))
    step: Any = jf.distribute(job.train_step, (job.state, batch_of(0)), "single")
    state, losses = jax.tree.map(jnp.copy, job.state), []
    for dtype in ("uint64", ">i8", "int32", "uint8", "int64"):  # only the host handles them
        batch = batch_of(0)
        for name in ("ids", "item"):
            batch[name] = batch[name].astype(dtype)
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert len(step.tables.stores["users"]) == len(
        np.unique(np.append(batch_of(0)["ids"], batch_of(0)["item"]))
    )


def test_an_empty_list_of_ids_has_no_rows() -> None:
    job = sparse_job(jf.tables.Sgd(RATE))
    batch = batch_of(0)
    batch["ids"] = np.zeros((8, 0), np.int64)
    step: Any = jf.distribute(job.train_step, (job.state, batch), "single")
    step(jax.tree.map(jnp.copy, job.state), batch)
    assert len(step.tables.stores["users"]) == len(np.unique(batch["item"]))
