"""State that servers update and the loss reads: target networks, averages of weights."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import PassError
from jaxfleet.runtime.step_state import Handle

ROWS, FEATURES, OUT = 8, 4, 2
Tx = optax.GradientTransformationExtraArgs


def pserver(**fields: Any) -> jf.DistributedStrategy:
    return jf.DistributedStrategy(min_block_size=4, max_imbalance=0, **fields)


def params() -> dict[str, jax.Array]:
    return {"w": jnp.arange(1.0, 1.0 + FEATURES * OUT).reshape(FEATURES, OUT) / 10}


def batches(count: int = 3) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [{"x": draw.normal(size=(ROWS, FEATURES)).astype(np.float32)} for _ in range(count)]


def distance(params: Any, target: Any, batch: Any) -> jax.Array:
    wanted = jax.lax.stop_gradient(1 + 0.9 * batch["x"] @ target["w"])
    return jnp.square(batch["x"] @ params["w"] - wanted).mean()


def averaging(tx: Tx) -> Any:
    """Returns a step whose loss reads an average of its weights, and its initial state."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(distance)(state["params"], state["target"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new: Any = optax.apply_updates(state["params"], updates)
        target = optax.incremental_update(new, state["target"], 0.1)
        after = {"params": new, "opt": opt, "target": target}
        return after, {"loss": value, "after": distance(new, target, batch)}

    return step, {"params": params(), "opt": tx.init(params()), "target": params()}


def test_a_target_that_follows_the_parameters_is_the_same_over_servers() -> None:
    step, state = averaging(jf.distributed_optimizer(optax.sgd(0.1, momentum=0.9)))
    found = jf.verify(step, state, batches(), pserver())
    assert found.same_on_all
    assert found.largest < 1e-5


def test_such_state_travels_as_parameters_do_and_the_rest_stays_on_servers() -> None:
    step, state = averaging(jf.distributed_optimizer(optax.sgd(0.1, momentum=0.9)))
    twin = jf.Twin(step, (state, batches()[0]), pserver())

    def script(trained: Any) -> Any:
        after, metrics = trained(state, batches()[0])
        assert isinstance(after["target"]["w"], jax.Array)
        assert all(isinstance(leaf, Handle) for leaf in jax.tree.leaves(after["opt"]))
        return trained.pull(after), (metrics,)

    result = twin.play(script)
    assert not np.array_equal(result.states[0]["target"]["w"], params()["w"])
    assert "every trainer runs the optimizer" not in str(twin.programs().dumps)


def test_of_state_that_every_slice_has_a_copy_of_one_travels() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            return jnp.square(batch["x"] @ params["w"] * state["turn"]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        grads = jax.tree.map(lambda leaf: leaf, grads)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        updates = jax.tree.map(lambda leaf: leaf * state["turn"], updates)
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt": opt, "turn": jnp.roll(state["turn"], 1)}, value

    state = {"params": params(), "opt": tx.init(params()), "turn": jnp.asarray([0.5, 1.5])}
    found = jf.verify(step, state, batches(), pserver())
    assert found.same_on_all
    assert found.largest < 1e-5


def test_trainers_that_do_not_wait_may_not_read_such_state() -> None:
    step, state = averaging(jf.distributed_optimizer(optax.sgd(0.1)))
    with pytest.raises(PassError, match="trainers read 'target/w', which servers update"):
        jf.Twin(step, (state, batches()[0]), pserver(communication="async")).programs()


def test_such_state_is_saved_by_servers_and_comes_back_to_trainers(tmp_path: Path) -> None:
    step, state = averaging(jf.distributed_optimizer(optax.sgd(0.1, momentum=0.9)))
    first, second = batches(2)

    def script(trained: Any) -> Any:
        new, _ = trained(state, first)
        trained.save(tmp_path / "job", new)
        new, _ = trained(new, second)
        wanted = trained.pull(new)
        new, _ = trained(trained.restore(tmp_path / "job"), second)
        return trained.pull(new), (wanted,)

    result = jf.Twin(step, (state, first), pserver()).play(script)
    for after, (wanted,) in zip(result.states, result.metrics, strict=True):
        for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)
