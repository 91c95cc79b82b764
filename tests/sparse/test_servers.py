"""Tables on servers: rows are bitwise equal on any number of servers, and match a dense table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.lower import ExecutableCache
from jaxfleet.tables.store import TableStore
from tests.sparse.models import DIM, OPTIMIZERS, RATE, VALUES, batch_of, run_dense, sparse_job

# As in test_one_process.py: two trainers' sums are sums of sums.
TOLERANCE = 2e-6


@pytest.mark.grid
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_to_the_bit_the_same_on_any_number_of_servers(optimizer: str) -> None:
    mine, dense = OPTIMIZERS[optimizer]
    job, cache = sparse_job(mine), ExecutableCache()
    batches = [batch_of(seed) for seed in range(8)]

    def script(step: Any) -> Any:
        state, losses = jax.tree.map(jnp.copy, job.state), []
        for batch in batches:
            state, loss = step(state, batch)
            losses.append(float(loss))
        return step.pull(state), (losses, step.tables.look_up("users", np.arange(VALUES)).copy())

    found = []
    for servers in (1, 2, 3):
        example, strategy = (job.state, batches[0]), jf.DistributedStrategy(min_block_size=2)
        twin = jf.Twin(job.train_step, example, strategy, servers=servers, cache=cache)
        result = twin.play(script)
        rows = [metrics[1].tobytes() for metrics in result.metrics]
        assert rows[0] == rows[1]
        found.append((rows[0], result.states[0]["params"]["w"].tobytes(), result.metrics[0][0]))
    assert found[0] == found[1] == found[2]
    wanted, losses = run_dense(job.table, dense, batches)
    np.testing.assert_allclose(found[0][2], losses, rtol=TOLERANCE)
    trained = np.frombuffer(found[0][0], np.float32).reshape(wanted["users"].shape)
    np.testing.assert_allclose(trained, wanted["users"], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_trainers_program_has_nothing_as_long_as_the_table() -> None:
    job = sparse_job(jf.tables.Sgd())
    twin = jf.Twin(job.train_step, (job.state, batch_of(0, values=2**62)), servers=2)
    program = twin.programs().trainer
    known = [v.shape for block in program.blocks for v in block.variables.values()]
    known += [v.shape for v in program.variables.values()]
    assert max(size for shape in known for size in shape if isinstance(size, int)) <= 8
    assert "send_rows(X=users@GRAD)" in str(program)
    assert all("users" in str(server.attrs["tables"]) for server in twin.programs().servers)


def one_table(loss: Any) -> tuple[Any, Any]:
    """Returns a step of a loss of parameters and a batch, and its state."""
    tx = jf.distributed_optimizer(optax.sgd(RATE))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {"t": TABLE.init(), "w": jnp.linspace(-1.0, 1.0, DIM)}
    return train_step, {"params": params, "opt": tx.init(params)}


TABLE = jf.embedding_table(
    "users", DIM, initializer=jf.tables.Uniform(-0.5, 0.5), optimizer=jf.tables.Sgd(RATE)
)
KEYS = np.arange(VALUES)


def in_a_loop(params: Any, batch: Any) -> Any:
    """Sums over the batch inside a loop: every trainer computes the whole batch."""
    rows = TABLE(params["t"], batch["item"])

    def turn(total: Any, _: Any) -> Any:
        return jnp.tanh(total + jnp.sum(rows @ params["w"])), None

    return jax.lax.scan(turn, jnp.float32(0), None, length=2)[0]


def looked_at(params: Any, batch: Any) -> Any:
    """Looks up rows without training them."""
    rows = TABLE(jax.lax.stop_gradient(params["t"]), batch["item"])
    return jnp.mean((rows @ params["w"] - batch["y"]) ** 2)


def linear(params: Any, batch: Any) -> Any:
    """Trains rows that are not needed for it."""
    return jnp.mean(TABLE(params["t"], batch["item"]).sum(-1)) + params["w"].sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", [in_a_loop, looked_at, linear])
@pytest.mark.parametrize("mode", ["servers", "devices"])
def test_every_shape_of_a_step_trains_what_one_device_does(loss: Any, mode: str) -> None:
    train_step, state = one_table(loss)
    batches = [batch_of(seed) for seed in range(4)]

    def script(step: Any) -> Any:
        now = jax.tree.map(jnp.copy, state)
        for batch in batches:
            now, _ = step(now, batch)
        return step.pull(now), np.array(step.tables.look_up("users", KEYS))

    alone, rows = script(jf.distribute(train_step, (state, batches[0]), "single"))
    if mode == "servers":
        result = jf.Twin(train_step, (state, batches[0]), servers=2).play(script)
        found, other = result.states[1], result.metrics[1]
    else:
        strategy = jf.DistributedStrategy(devices=4)
        found, other = script(jf.distribute(train_step, (state, batches[0]), strategy))
    np.testing.assert_allclose(other, rows, rtol=TOLERANCE, atol=TOLERANCE)
    w = found["params"]["w"]
    np.testing.assert_allclose(w, alone["params"]["w"], rtol=TOLERANCE, atol=TOLERANCE)
    assert (np.asarray(rows) != TableStore(TABLE.spec).look_up(KEYS)).any() == (loss != looked_at)


def frozen_in_part(params: Any, batch: Any) -> Any:
    """Looks up the same table twice, and trains through one lookup only."""
    frozen = MOVING(jax.lax.stop_gradient(params["t"]), batch["ids"]).sum(axis=1)
    return jnp.mean(((MOVING(params["t"], batch["item"]) + frozen) @ params["w"]) ** 2)


MOVING = jf.embedding_table("moving", DIM, optimizer=jf.tables.Momentum(RATE, 0.9))


@pytest.mark.parametrize("servers", [0, 2])
def test_momentum_moves_no_row_that_is_looked_up_frozen(servers: int) -> None:
    train_step, state = one_table(frozen_in_part)
    both = {"item": np.array([1, 1, 2, 3]), "ids": np.array([[2, 4], [5, 6], [5, 4], [1, 7]])}
    other = {"item": np.array([8, 8, 9, 9]), "ids": np.array([[1, 2], [3, 4], [5, 6], [7, 8]])}

    def script(step: Any) -> Any:
        now, _ = step(jax.tree.map(jnp.copy, state), both)
        before = np.array(step.look_up("moving", KEYS))
        now, _ = step(now, other)
        moved = np.flatnonzero((step.look_up("moving", KEYS) != before).any(axis=1))
        return now, moved.tolist()

    if servers:
        result = jf.Twin(train_step, (state, both), servers=servers).play(script)
        assert [list(found) for found in result.metrics] == [[8, 9], [8, 9]]
    else:
        assert script(jf.distribute(train_step, (state, both), "single"))[1] == [8, 9]


def test_trainers_with_rows_of_their_own_train_what_all_rows_do() -> None:
    job, batches = sparse_job(jf.tables.Sgd(RATE)), [batch_of(seed) for seed in range(4)]

    def script(step: Any) -> Any:
        state = jax.tree.map(jnp.copy, job.state)
        for batch in batches:
            share = 8 // share_of[step.strategy.batch]
            start = step.client.me.trainer * share if share < 8 else 0
            own = {name: array[start : start + share] for name, array in batch.items()}
            state, _ = step(state, own)
        return state, step.tables.look_up("users", KEYS).tobytes()

    share_of = {"global": 1, "local": 2}
    found = []
    for kind in share_of:
        strategy = jf.DistributedStrategy(batch=kind)  # type: ignore[arg-type]
        example = {n: a[: 8 // share_of[kind]] for n, a in batches[0].items()}
        twin = jf.Twin(job.train_step, (job.state, example), strategy)
        found.append(twin.play(script).metrics)
    assert found[0] == found[1]
