"""Valid batches: any number of rows, anywhere, of any type; and invalid ones."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf
from jaxfleet.errors import FeedError
from tests.runtime.toys import (
    FEATURES,
    State,
    assert_alike,
    distributed,
    plain,
    rows,
    start,
    training,
)


def cut(batch: Any, devices: int, axis_name: str) -> Any:
    """Returns the batch sharded over devices in a mesh of the user's."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (axis_name,))
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(axis_name)))


@pytest.mark.few(1)
@pytest.mark.parametrize("devices", [1, 4])
def test_one_capture_serves_every_number_of_rows(devices: int) -> None:
    tx, calls = jf.distributed_optimizer(optax.adam(0.1)), []
    train_step = training(tx)

    def counted(state: State, batch: Any) -> tuple[State, Any]:
        calls.append(batch["x"].shape)
        return train_step(state, batch)

    strategy = jf.DistributedStrategy(devices=devices)
    step = jf.distribute(counted, (start(tx), rows(8)), strategy)
    calls.clear()
    for count in (8, 16, 4, 64, 8):
        assert_alike(step(start(tx), rows(count)), plain(1, rows(count)))
    assert not calls


@pytest.mark.few(4)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda batch: jax.tree.map(jnp.asarray, batch),
        lambda batch: jax.tree.map(lambda x: x.astype(np.float64), batch),
        lambda batch: jax.device_put(batch, jax.devices()[0]),
        lambda batch: jax.device_put(batch, jax.devices()[6]),
        lambda batch: cut(batch, 4, "data"),
        lambda batch: cut(batch, 4, "mine"),
        lambda batch: cut(batch, 8, "mine"),
        lambda batch: {"x": batch["x"], "y": jnp.asarray(batch["y"])},
    ],
    ids=[
        "jax", "double", "first device", "seventh device", "cut", "cut by another name",
        "cut in eight", "numpy and jax",
    ],
)  # fmt: skip
def test_a_batch_may_lie_anywhere(make: Any, devices: int) -> None:
    step, state = distributed(devices=devices)
    for _ in range(2):
        state, metrics = step(state, make(rows(8)))
    assert_alike((state, metrics), plain(2, rows(8)))


def test_a_batch_that_is_cut_already_is_not_copied(caplog: pytest.LogCaptureFixture) -> None:
    step, state = distributed()
    batch = cut(rows(8), 4, "mine")
    state, _ = step(state, batch)
    with jax.transfer_guard("disallow"), jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, metrics = step(state, batch)
    assert not [line for line in caplog.messages if line.startswith("Compiling")]
    assert_alike((state, metrics), plain(2, rows(8)))
    assert not batch["x"].is_deleted()


def columns(count: int) -> dict[str, Any]:
    """Returns columns of many types, and a scalar."""
    rng = np.random.default_rng(5)
    return {
        "x": rng.normal(size=(count, FEATURES)).astype(np.float32),
        "pixels": rng.integers(0, 256, (count, 3), dtype=np.uint8),
        "member": rng.random(count) < 0.5,
        "place": rng.integers(-9, 9, count),
        "half": rng.random(count).astype(np.float16),
        "scale": 0.5,
        "none": None,
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("devices", [1, 4])
def test_columns_of_every_type(devices: int) -> None:
    def train_step(state: State, batch: Any) -> tuple[State, Any]:
        y = batch["pixels"].sum(axis=1, dtype=jnp.float32) / 255.0
        y = jnp.where(batch["member"], y, batch["half"].astype(jnp.float32)) * batch["scale"]
        state, metrics = inner(state, {"x": batch["x"], "y": y})
        counts = {
            "members": batch["member"].sum(),
            "brightest": batch["pixels"].max(),
            "all": batch["member"].all(),
            "places": batch["place"],
        }
        return state, {**metrics, **counts}

    inner = training(optax.adam(0.1))
    wanted = jax.jit(train_step)(start(optax.adam(0.1)), columns(8))
    tx = jf.distributed_optimizer(optax.adam(0.1))
    inner = training(tx)
    strategy = jf.DistributedStrategy(devices=devices)
    step = jf.distribute(train_step, (start(tx), columns(8)), strategy)
    found = step(start(tx), columns(8))
    assert_alike(found, wanted)
    types = [leaf.dtype for leaf in jax.tree.leaves(found)]
    assert types == [leaf.dtype for leaf in jax.tree.leaves(wanted)]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (rows(6), "a batch of 6 rows cannot be divided among 4 devices"),
        (rows(8)["x"], "the batch has another structure than the example"),
        ({**rows(8), "x": rows(8)["x"][:, :2]}, r"'batch/x' has shape \[8, 2\]"),
        ({**rows(8), "y": rows(8)["y"] > 0}, r"'batch/y' is fed bool, but it is f32\[b\]"),
        ({**rows(8), "y": rows(12)["y"]}, "differ in their rows"),
        ({**rows(8), "y": "eight"}, "'batch/y' has shape"),
    ],
    ids=["rows", "structure", "shape", "dtype", "leaves differ", "text"],
)
def test_a_batch_that_is_refused_leaves_the_state_as_it_was(batch: Any, message: str) -> None:
    step, state = distributed()
    state, _ = step(state, rows(8))
    with pytest.raises(FeedError, match=message):
        step(state, batch)
    assert_alike(step(state, rows(8)), plain(2, rows(8)))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_batch_whose_memory_is_gone_is_refused(devices: int) -> None:
    step, state = distributed(devices=devices)
    batch = jax.tree.map(jnp.asarray, rows(8))
    state, _ = step(state, batch)
    batch["x"].delete()
    with pytest.raises(FeedError, match="the batch was used before"):
        step(state, batch)


def test_a_state_that_is_refused_leaves_nothing_done() -> None:
    step, state = distributed()
    wrong = {**state, "params": {**state["params"], "w": jnp.zeros(FEATURES, jnp.int32)}}
    with pytest.raises(FeedError, match=r"'params/w' is fed i32, but it is f32\[6\]"):
        step(wrong, rows(8))
    assert_alike(step(state, rows(8)), plain(1, rows(8)))
