"""Variables are named after the paths of the user's trees."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.ir import Kind, parse, verify
from tests.capture.common import gradients_of, params_of

ROWS = np.ones((4, 3), np.float32)


def unchanged(state: Any, batch: Any) -> Any:
    return state, {}


def names_of(state: Any, batch: Any = ROWS, kind: Kind = Kind.STATE) -> list[str]:
    program = jf.capture(unchanged, example=(state, batch)).program
    verify(program)
    assert parse(str(program)) == program
    return [variable.name for variable in program.of_kind(kind)]


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


ONE = jnp.float32(1)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"params": {"w": ONE}}, ["params/w"]),
        ({"opt": (ONE, [ONE])}, ["opt/0", "opt/1/0"]),
        (Pair(ONE, ONE), ["left", "right"]),
        ((ONE, {"w": ONE}), ["state/0", "state/1/w"]),
        ({0: ONE, 10: ONE}, ["state/0", "state/10"]),
        (ONE, ["state"]),
        ({"a b": ONE, "": ONE, "ü": ONE}, ["state", "a b", "ü"]),
        ({"a/b": ONE, "a": {"b": ONE}}, ["a/b", "a/b~1"]),
        ({"batch": {"x": ONE}, "metrics": ONE, "state": ONE}, None),
        ({"const.0": ONE, "add.1": ONE, "w@GRAD": ONE}, ["add.1", "const.0", "w@GRAD"]),
    ],
)
def test_state_is_named_after_its_paths(state: Any, names: list[str] | None) -> None:
    reserved = ["state/batch/x", "state/metrics", "state/state"]
    assert names_of(state) == (names or reserved)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (ROWS, ["batch"]),
        ((ROWS, ROWS), ["batch/0", "batch/1"]),
        ({"x": ROWS, "y": [ROWS]}, ["batch/x", "batch/y/0"]),
    ],
)
def test_a_batch_is_named_after_its_paths(batch: Any, names: list[str]) -> None:
    assert names_of({"w": ONE}, batch, Kind.DATA) == names


def test_metrics_are_named_after_their_paths() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": batch.sum(), "by": (batch.max(), {"min": batch.min()})}

    captured = jf.capture(step, example=({"w": ONE}, ROWS))
    assert captured.metrics == ("metrics/by/0", "metrics/by/1/min", "metrics/loss")
    assert "metrics/loss: f32[] = jax.reduce_sum(batch)" in str(captured.program)


def test_a_single_metric_is_named_metrics() -> None:
    captured = jf.capture(lambda state, batch: (state, batch.sum()), example=({"w": ONE}, ROWS))
    assert captured.metrics == ("metrics",)


def test_names_that_a_user_chose_hide_none_of_ours() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    table = np.arange(20, dtype=np.float32).reshape(4, 5)

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) @ table))(state["w"])
        updates, _ = tx.update(grads, tx.init(grads), state["w"])
        return {**state, "w": state["w"] + updates}, {}

    odd = ("const.0", "w@GRAD", "tanh.2", "w.old", *(f"mul.{i}" for i in range(30)))
    program = jf.capture(
        step, example=({"w": jnp.ones((3, 4)), **dict.fromkeys(odd, ONE)}, ROWS)
    ).program
    verify(program)
    assert gradients_of(program) == [("w", "w@GRAD~1")]


class Net(nn.Module):
    """A layer under names that Flax makes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(nn.relu(nn.Dense(4)(x)))


def test_flax_paths_and_scopes_name_parameters_gradients_and_temporaries() -> None:
    tx, net = jf.distributed_optimizer(optax.sgd(0.1)), Net()

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: net.apply(p, batch).sum())(state)
        updates, _ = tx.update(grads, tx.init(state), state)
        return optax.apply_updates(state, updates), {}

    program = jf.capture(step, example=(net.init(jax.random.key(0), ROWS), ROWS)).program
    assert params_of(program) == [
        *("params/Dense_0/bias", "params/Dense_0/kernel"),
        *("params/Dense_1/bias", "params/Dense_1/kernel"),
    ]
    assert ("params/Dense_0/kernel", "params/Dense_0/kernel@GRAD") in gradients_of(program)
    assert any(name.startswith("Dense_1.") for name in program.root.variables)
