"""Gradient accumulation: matches optax's MultiSteps on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import PassError
from tests.collective.models import (
    OPTIMIZERS,
    STEPS,
    State,
    assert_close,
    batch,
    distributed,
    loss,
    start,
)
from tests.zoo import ZOO

EVERY = 4


def merging(tx: Any, *, wrapped: bool = False) -> Callable[[State, Any], tuple[State, Any]]:
    """Returns a step with a metric of its update: the gradients given to the optimizer."""
    tx = jf.distributed_optimizer(tx) if wrapped else tx

    def train_step(state: State, data: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(grads, state.opt, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, opt), {"loss": value, "moved": optax.tree.norm(updates)}

    return train_step


class Oracle:
    """The same on one device, by optax."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self.tx, multi = tx, optax.MultiSteps(tx, EVERY)
        self.step: Callable[..., Any] = jax.jit(merging(multi))
        self.state = State(start(tx).params, multi.init(start(tx).params))
        self.moved = 0.0

    def __call__(self, number: int) -> tuple[State, Any]:
        self.state, metrics = self.step(self.state, batch(number))
        if (number + 1) % EVERY == 0:
            self.moved = metrics["moved"]
        return State(self.state.params, self.state.opt.inner_opt_state), {
            "loss": metrics["loss"],
            "moved": self.moved,
        }


def strategy(devices: int, **options: Any) -> jf.DistributedStrategy:
    return jf.DistributedStrategy(devices=devices, merge=EVERY, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("sgd", 1, {}),
        ("momentum", 2, {}),
        ("clipped", 4, {}),
        ("clipped", 2, {"sharded": True}),
        ("adam", 4, {"lowering": "pmap", "sharded": True, "fuse_allreduce_bytes": 1 << 20}),
    ],
    ids=str,
)
def test_calls_are_merged_as_optax_does(name: str, devices: int, options: Any) -> None:
    tx = OPTIMIZERS[name]()
    step = jf.distribute(
        merging(tx, wrapped=True), (start(tx), batch(0)), strategy(devices, **options)
    )
    state, oracle = start(tx), Oracle(tx)
    for number in range(STEPS):
        state, metrics = step(state, batch(number))
        assert_close((state, metrics), oracle(number), f"after call {number}")


def test_gradients_are_reduced_once_an_update() -> None:
    step, _ = distributed("adam", strategy(2))
    root, *others = step.program.blocks
    assert not [x for x in root.ops if x.type.startswith("c_") and x.role_var]
    assert len([x for block in others for x in block.ops if x.type == "c_allreduce_sum"]) == 3
    cut, _ = distributed("adam", strategy(2, sharded=True))
    moved = [x.type for x in cut.program.root.ops if x.type in {"c_allgather", "c_reducescatter"}]
    assert not moved


def test_what_was_added_up_is_saved_and_restored(tmp_path: Path) -> None:
    step, state = distributed("momentum", strategy(2))
    for number in range(EVERY + 2):
        state, _ = step(state, batch(number))
    step.save(tmp_path / "merged", state)
    again, _ = distributed("momentum", strategy(2))
    other = again.restore(tmp_path / "merged")
    for number in range(EVERY + 2, 2 * EVERY):
        state, _ = step(state, batch(number))
        other, _ = again(other, batch(number))
    assert_close(other, state, allowed=0)
    assert "one update every 4 calls" in step.explain()


@pytest.mark.grid
def test_devices_that_train_apart_merge_their_own() -> None:
    devices = 2
    both = jf.DistributedStrategy(
        devices=devices, merge=2, communication="local_sgd", k_steps=EVERY
    )
    step, state = distributed("adam", both)
    multi: Any = optax.MultiSteps(OPTIMIZERS["adam"](), 2)
    one = jax.jit(merging(multi))
    params = start(OPTIMIZERS["adam"]()).params
    states = [State(params, multi.init(params)) for _ in range(devices)]
    for number in range(2 * EVERY):
        state, _ = step(state, batch(number))
        rows = [tuple(np.split(x, devices)[n] for x in batch(number)) for n in range(devices)]
        states = [one(s, data)[0] for s, data in zip(states, rows, strict=True)]
        if (number + 1) % EVERY == 0:
            met = jax.tree.map(lambda *xs: np.mean(np.stack(xs), 0), *[s.params for s in states])
            states = [State(met, s.opt) for s in states]
            assert_close(state.params, met, f"after call {number}")


@pytest.mark.grid
def test_loops_beside_the_update_stay_what_they_are() -> None:
    name = "scan_layers"
    built = ZOO[name].build(jf.distributed_optimizer)
    data = built.batch(0, ZOO[name].rows)
    twice = jf.distribute(built.train_step, (built.state, data), strategy(2, amp="float16"))
    state, metrics = twice(built.state, data)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state, metrics)))


def test_an_update_that_other_gradients_need_cannot_wait() -> None:
    built = ZOO["gan"].build(jf.distributed_optimizer)
    data = built.batch(0, ZOO["gan"].rows)
    with pytest.raises(PassError, match="'judge/params/fc0/b' is updated before all gradients"):
        jf.distribute(built.train_step, (built.state, data), strategy(2))
