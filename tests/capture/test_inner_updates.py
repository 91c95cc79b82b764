"""Updates inside loops and branches: captured with their parameters, correct on devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, PassError
from jaxfleet.ir import Kind, Role, parse

ROWS, FEATURES, OUT = 8, 4, 2
State = dict[str, Any]
Step = Callable[[State, Any], tuple[State, Any]]


def params() -> dict[str, jax.Array]:
    w = jnp.arange(1.0, 1.0 + FEATURES * OUT).reshape(FEATURES, OUT) / 10
    return {"b": jnp.full(OUT, 0.1), "w": w}


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "y": draw.normal(size=(ROWS, OUT)).astype(np.float32)}


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.square(jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]).mean()


def updated(tx: Any, state: State, grads: Any) -> State:
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def in_a_scan(tx: Any) -> Step:
    """Updates once for each part of the batch, in two passes, as PPO does."""

    def step(state: State, batch: Any) -> tuple[State, Any]:
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

        def once(state: State, part: Any) -> tuple[State, jax.Array]:
            value, grads = jax.value_and_grad(loss)(state["params"], part)
            return updated(tx, state, grads), value

        def epoch(state: State, _: None) -> tuple[State, jax.Array]:
            return jax.lax.scan(once, state, parts)

        state, values = jax.lax.scan(epoch, state, None, length=2)
        return state, values.mean()

    return step


def in_a_branch(tx: Any) -> Step:
    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        new = jax.lax.cond(value < 0.9, lambda: updated(tx, state, grads), lambda: state)
        return new, value

    return step


def in_a_fori_loop(tx: Any) -> Step:
    def step(state: State, batch: Any) -> tuple[State, Any]:
        def turn(_: Any, state: State) -> State:
            return updated(tx, state, jax.grad(loss)(state["params"], batch))

        return jax.lax.fori_loop(0, 3, turn, state), loss(state["params"], batch)

    return step


def in_a_while_loop(tx: Any) -> Step:
    def step(state: State, batch: Any) -> tuple[State, Any]:
        def turn(state: State) -> State:
            return updated(tx, state, jax.grad(loss)(state["params"], batch))

        end = jax.lax.while_loop(lambda state: loss(state["params"], batch) > 0.8, turn, state)
        return end, loss(state["params"], batch)

    return step


KINDS = {"scan": in_a_scan, "cond": in_a_branch, "fori": in_a_fori_loop, "while": in_a_while_loop}


def started(tx: Any) -> State:
    return {"params": params(), "opt": tx.init(params())}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_in_a_loop_or_a_branch_gives_on_devices_what_one_gives(kind: str) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.3, momentum=0.9))
    step, state = KINDS[kind](tx), started(tx)
    trained = jf.distribute(step, (state, batch()), jf.DistributedStrategy(devices=2, donate=False))
    expected, found = state, state
    for seed in range(2):
        expected, _ = jax.jit(step)(expected, batch(seed))
        found, _ = trained(found, batch(seed))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_such_an_update_gives_over_servers_what_one_device_gives(kind: str) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.3, momentum=0.9))
    found = jf.verify(KINDS[kind](tx), started(tx), [batch(0), batch(1)])
    assert found.same_on_all
    assert found.largest < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_its_parameters_are_those_that_the_loop_began_with(kind: str) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.3, momentum=0.9))
    program = jf.capture(KINDS[kind](tx), example=(started(tx), batch())).program
    assert {v.name for v in program.of_kind(Kind.PARAM)} == {"params/b", "params/w"}
    (update,) = [op for op in program.root.ops if "params/w" in op.writes]
    assert update.role is Role.OPTIMIZE
    assert "jaxfleet" not in str(program)
    assert parse(str(program)) == program


def test_a_gradient_in_a_loop_that_may_be_of_two_leaves_asks_for_the_parameters() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def turn(_: Any, params: Any) -> Any:
            updates, _ = tx.update(jax.grad(loss)(params, batch), tx.init(params))
            return optax.apply_updates(params, updates)

        return {**state, "params": jax.lax.fori_loop(0, 2, turn, state["params"])}, {}

    state = {"params": params(), "best": params()}
    with pytest.raises(CaptureError, match="inside a loop or a branch may belong to any of") as got:
        jf.capture(step, example=(state, batch()))
    assert any("pass the parameters too" in note for note in got.value.__notes__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{"merge": 2}, {"amp": "float16"}, {"on_nonfinite": "skip"}])
def test_what_treats_each_gradient_refuses_such_an_update(
    fields: dict[str, Any], kind: str
) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    strategy = jf.DistributedStrategy(devices=1, **fields)
    said = "the update of 'params/b' runs inside a loop or a branch"
    with pytest.raises(PassError, match=said) as refused:
        jf.distribute(KINDS[kind](tx), (started(tx), batch()), strategy)
    assert Path(__file__).name in "\n".join([str(refused.value), *refused.value.__notes__])


@pytest.mark.parametrize("fields", [{"merge": 2}, {"amp": "float16"}, {"on_nonfinite": "skip"}])
def test_what_treats_each_gradient_takes_a_frozen_parameter(fields: dict[str, Any]) -> None:
    frozen = optax.masked(optax.set_to_zero(), {"b": True, "w": False})
    tx = jf.distributed_optimizer(optax.chain(optax.sgd(0.1), frozen))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), value

    strategy = jf.DistributedStrategy(devices=1, donate=False, **fields)
    trained, state = jf.distribute(step, (started(tx), batch()), strategy), started(tx)
    for _ in range(2):
        state, _ = trained(state, batch())
    np.testing.assert_array_equal(state["params"]["b"], params()["b"])
    assert np.isfinite(state["params"]["w"]).all()
    assert not np.array_equal(state["params"]["w"], params()["w"])


def test_servers_refuse_to_leave_out_such_an_update() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    strategy = jf.DistributedStrategy(on_nonfinite="skip")
    with pytest.raises(PassError, match="skip_nonfinite: the update of 'params/b' runs inside"):
        jf.Twin(in_a_fori_loop(tx), (started(tx), batch()), strategy).programs()


@pytest.mark.parametrize("kind", ["cond", "fori"])
def test_trainers_that_do_not_wait_refuse_such_an_update(kind: str) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    strategy = jf.DistributedStrategy(communication="async")
    with pytest.raises(PassError, match=r"inside a loop or a branch|computes with the batch"):
        jf.Twin(KINDS[kind](tx), (started(tx), batch()), strategy).programs()
