"""Updates that servers do not support, made by trainers instead."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import PassError
from jaxfleet.runtime.pserver_job import explain_job

ROWS, FEATURES, OUT = 8, 4, 2
STRATEGY = jf.DistributedStrategy(min_block_size=4, max_imbalance=0)


def params() -> dict[str, jax.Array]:
    w = jnp.arange(1.0, 1.0 + FEATURES * OUT).reshape(FEATURES, OUT) / 10
    return {"b": jnp.full(OUT, 0.1), "w": w}


def batches(count: int = 3) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [
        {
            "x": draw.normal(size=(ROWS, FEATURES)).astype(np.float32),
            "y": draw.normal(size=(ROWS, OUT)).astype(np.float32),
        }
        for _ in range(count)
    ]


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.square(jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]).mean()


def started(tx: Any, **more: Any) -> dict[str, Any]:
    return {"params": params(), "opt": tx.init(params()), **more}


def updated(tx: Any, state: Any, grads: Any, **extra: Any) -> dict[str, Any]:
    updates, opt = tx.update(grads, state["opt"], state["params"], **extra)
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}


def twice(tx: Any) -> Any:
    """Returns a step that updates two times, as PPO does."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        for _ in range(2):
            value, grads = jax.value_and_grad(loss)(state["params"], batch)
            state = updated(tx, state, grads)
        return state, value

    return step, started(tx)


def with_the_batch(tx: Any) -> Any:
    """Returns a step whose optimizer computes gradients of the batch itself, as SAM does."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        new = updated(tx, state, grads, grad_fn=lambda p, _: jax.grad(loss)(p, batch))
        return new, value

    return step, started(tx)


def if_finite(tx: Any) -> Any:
    """Returns a step that updates if complete gradients are finite, and scales its loss."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def scaled(params: Any) -> jax.Array:
            return loss(params, batch) * state["scale"]

        value, grads = jax.value_and_grad(scaled)(state["params"])
        grads = jax.tree.map(lambda leaf: leaf / state["scale"], grads)
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]).all()
        new = updated(tx, state, grads)
        new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        return {**new, "scale": jnp.where(finite, state["scale"] * 2, state["scale"] / 2)}, value

    return step, started(tx, scale=jnp.float32(2.0**125))


def meta(tx: Any) -> Any:
    """Returns a step that differentiates an update with respect to its learning rate."""
    outer = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def after(rate: jax.Array) -> tuple[jax.Array, Any]:
            grads = jax.grad(loss)(state["params"], batch)
            updates, opt = tx.update(grads, state["opt"], state["params"])
            moved = jax.tree.map(lambda leaf: leaf * jnp.exp(rate), updates)
            new = optax.apply_updates(state["params"], moved)
            return loss(new, jax.tree.map(lambda leaf: leaf[::-1], batch)), (new, opt)

        (value, (new, opt)), grad = jax.value_and_grad(after, has_aux=True)(state["rate"])
        updates, outer_opt = outer.update(grad, state["outer"], state["rate"])
        rate = optax.apply_updates(state["rate"], updates)
        return {"params": new, "opt": opt, "rate": rate, "outer": outer_opt}, value

    rate = jnp.zeros(())
    return step, started(tx, rate=rate, outer=outer.init(rate))


def of_two_nets(tx: Any) -> Any:
    """Returns a step whose second net is evaluated by the newly updated first."""
    other = jf.distributed_optimizer(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        new = updated(tx, state, grads)

        def judged(actor: Any) -> jax.Array:
            moved = batch["x"] * actor["gain"] + actor["shift"]
            return loss(new["params"], {**batch, "x": moved})

        grads = jax.grad(judged)(state["actor"])
        updates, opt = other.update(grads, state["other"], state["actor"])
        return {**new, "actor": optax.apply_updates(state["actor"], updates), "other": opt}, value

    actor = {"gain": jnp.ones(FEATURES), "shift": jnp.zeros(FEATURES)}
    return step, started(tx, actor=actor, other=other.init(actor))


CONTRIB: Any = optax.contrib  # mypy does not see its names
SAM = CONTRIB.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
CASES: dict[str, tuple[Any, Any, str]] = {
    "sam": (with_the_batch, SAM, "the optimizer computes with the batch"),
    "finite": (if_finite, optax.sgd(0.1), "trainers make of what servers give them"),
    "meta": (meta, optax.sgd(0.1), "trainers make of what servers give them"),
    "norms that wait for each other": (
        of_two_nets,
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
        "depends on what servers make of another gradient in the same step",
    ),
}


def wrapped(name: str) -> tuple[Any, Any, str]:
    build, optimizer, why = CASES[name]
    return (*build(jf.distributed_optimizer(optimizer)), why)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_an_update_that_servers_cannot_make_is_made_by_trainers(name: str) -> None:
    step, state, _ = wrapped(name)
    found = jf.verify(step, state, batches(), STRATEGY)
    assert found.same_on_all
    assert found.largest < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_explanation_gives_the_reason_and_the_line(name: str) -> None:
    step, state, why = wrapped(name)
    twin = jf.Twin(step, (state, batches()[0]), STRATEGY)
    text = explain_job(twin.captured, twin.strategy, twin.programs())
    (line,) = [line for line in text.splitlines() if "every trainer runs the optimizer" in line]
    assert why in line
    assert re.search(r"test_updates_on_trainers\.py:\d+", line)


def test_the_explanation_counts_the_waits_of_sums_before_what_they_make() -> None:
    step, state, _ = wrapped("sam")
    twin = jf.Twin(step, (state, batches()[0]), STRATEGY)
    text = explain_job(twin.captured, twin.strategy, twin.programs())
    assert "a step waits for servers 3 times" in text  # two gradients, then the parameters


@pytest.mark.grid
def test_of_several_updates_in_one_call_servers_make_the_last() -> None:
    step, state = twice(jf.distributed_optimizer(optax.sgd(0.1, momentum=0.9)))
    found = jf.verify(step, state, batches(), STRATEGY)
    assert found.same_on_all
    assert found.largest < 1e-5


def test_an_update_that_servers_can_make_stays_with_them() -> None:
    tx = jf.distributed_optimizer(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), value

    twin = jf.Twin(step, (started(tx), batches()[0]), STRATEGY)
    job = twin.programs()
    stage = job.dumps["update_on_trainers"]
    assert stage.after is stage.before
    assert "every trainer runs" not in explain_job(twin.captured, twin.strategy, job)


def test_several_updates_in_one_call_are_refused_where_nobody_waits() -> None:
    step, state = twice(jf.distributed_optimizer(optax.sgd(0.1)))
    relaxed = jf.DistributedStrategy(communication="async")
    with pytest.raises(PassError, match="is updated more than once in a step"):
        jf.Twin(step, (state, batches()[0]), relaxed).programs()


def test_an_optimizer_state_that_trainers_hold_is_saved_and_restored(tmp_path: Path) -> None:
    step, state, _ = wrapped("finite")
    first, second = batches(2)

    def script(trained: Any) -> Any:
        new, _ = trained(state, first)
        trained.save(tmp_path / "job", new)
        new, _ = trained(new, second)
        again, _ = trained(trained.restore(tmp_path / "job"), second)
        return trained.pull(again), (new,)

    result = jf.Twin(step, (state, first), STRATEGY).play(script)
    for after, (wanted,) in zip(result.states, result.metrics, strict=True):
        for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


NORMS_THAT_CROSS_TWICE = {
    "prodigy": CONTRIB.prodigy(),
    "dadapt": CONTRIB.dadapt_adamw(),
    "mechanize": CONTRIB.mechanize(optax.sgd(0.1)),
    "clipped twice": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(0.1), optax.clip_by_global_norm(0.01)
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", NORMS_THAT_CROSS_TWICE)
def test_an_optimizer_whose_norms_cross_twice_gives_what_one_device_gives(name: str) -> None:
    tx = jf.distributed_optimizer(NORMS_THAT_CROSS_TWICE[name])

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), value

    found = jf.verify(step, started(tx), batches(), STRATEGY)
    assert found.same_on_all
    assert found.largest < 1e-5
