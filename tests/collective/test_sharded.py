"""The optimizer's state is sharded over devices, and the step matches one device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from tests.collective.models import (
    OPTIMIZERS,
    STEPS,
    State,
    assert_close,
    batch,
    distributed,
    loss,
    start,
    training,
)


def sharded(devices: int, **options: Any) -> jf.DistributedStrategy:
    return jf.DistributedStrategy(devices=devices, sharded=True, **options)


def bytes_each(tree: Any) -> int:
    """Returns the most bytes of a tree on one device."""
    held = dict[Any, int]()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "devices"), [("sgd", 2), ("momentum", 4), ("adam", 2), ("clipped", 4)]
)
def test_it_computes_what_one_device_does_with_a_part_of_the_state(name: str, devices: int) -> None:
    step, state = distributed(name, sharded(devices))
    wanted, plain = start(OPTIMIZERS[name]()), jax.jit(training(OPTIMIZERS[name]()))
    for number in range(STEPS):
        state, metrics = step(state, batch(number))
        wanted, expected = plain(wanted, batch(number))
        assert_close((state, metrics), (wanted, expected), f"after step {number}")
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt))
    small = 8  # step counters are replicated
    assert bytes_each(state.opt) <= whole / devices + small


@pytest.mark.grid
def test_pmap_and_several_executables_hold_the_same_parts() -> None:
    wanted, first = distributed("clipped", sharded(4))
    expected = wanted(first, batch(0))
    for options in ({"lowering": "pmap"}, {"passes": "cut_apart"}, {"donate": False}):
        step, state = distributed("clipped", sharded(4, **options))
        assert_close(step(state, batch(0)), expected, str(options))


@pytest.mark.grid
def test_a_checkpoint_goes_from_one_mode_to_the_other(tmp_path: Path) -> None:
    step, state = distributed("adam", sharded(4))
    for number in range(3):
        state, _ = step(state, batch(number))
    step.save(tmp_path / "cut", state)
    single, _ = distributed("adam", jf.DistributedStrategy(mode="single"))
    again, _ = distributed("adam", sharded(2))
    for other in (single, again):
        found, _ = other(other.restore(tmp_path / "cut"), batch(3))
        wanted, _ = step(step.restore(tmp_path / "cut"), batch(3))
        assert_close(found, wanted)


def test_what_cannot_be_cut_stays_whole_and_explain_says_why() -> None:
    tx = optax.chain(by_largest(), optax.trace(0.9), optax.sgd(0.1))

    def train_step(state: State, data: Any) -> tuple[State, Any]:
        grads = jax.grad(lambda p: loss(p, data) + jnp.sum(p["odd"] ** 2))(state.params)
        updates, opt = tx.update(grads, state.opt, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, opt), {}

    def fresh() -> State:
        params = {**start(tx).params, "odd": jnp.ones((3, 5))}
        return State(params, tx.init(params))

    one = jax.jit(train_step)
    wanted = fresh()
    tx = jf.distributed_optimizer(tx)
    step = jf.distribute(train_step, (fresh(), batch(0)), sharded(2))
    tx, state = optax.chain(by_largest(), optax.trace(0.9), optax.sgd(0.1)), fresh()
    for number in range(3):
        state, _ = step(state, batch(number))
        wanted, _ = one(wanted, batch(number))
    assert_close(state, wanted)
    assert isinstance(step, jf.Step)
    said = step.explain()
    assert "opt/1/trace/odd: no axis divides by 2" in said
    assert "opt/0/b1, opt/0/w1, opt/0/w2: jax.sort needs it whole" in said
    assert state.opt[1].trace["w2"].sharding.spec != state.opt[1].trace["odd"].sharding.spec


def by_largest() -> optax.GradientTransformation:
    """Keeps each leaf's gradients sorted along the first axis: rows depend on each other."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        kept = jax.tree.map(lambda s, g: jnp.sort(s + g, axis=0), state, updates)
        return updates, kept

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def test_it_is_of_the_mode_collective() -> None:
    with pytest.raises(StrategyError, match="sharded in mode 'pserver'"):
        jf.DistributedStrategy(mode="pserver", sharded=True)
    with pytest.raises(StrategyError, match=r"sharded is 1\.0, but must be True or False"):
        jf.DistributedStrategy(sharded=1.0)  # type: ignore[arg-type]
