"""The causes in docs/errors.md raise the messages that the page gives for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import JaxfleetError
from tests.docs.test_errors import is_made_of, quoted_messages

TX = jf.distributed_optimizer(optax.sgd(0.1))
BARE = optax.sgd(0.1)
TABLE = jf.embedding_table("causes", 4)
X = np.ones((8, 3), np.float32)


def mean_of(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - 1) ** 2)


def step_of(
    inside: Callable[[Any], Any] = lambda batch: batch,
    *,
    tx: Any = TX,
    loss: Callable[[Any, Any], jax.Array] = mean_of,
    result: Callable[[Any, Any], Any] = lambda state, loss: (state, loss),
) -> Callable[[Any, Any], Any]:
    """Returns a training step with something in it that a user may write."""

    def train_step(state: Any, batch: Any) -> Any:
        inside(batch)
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return result({**state, **new}, value)

    return train_step


def example(*, params: Any = None, **more: Any) -> tuple[Any, Any]:
    params = {"w": jnp.zeros(3), **(params or {})}
    return {"params": params, "opt": TX.init(params)}, {"x": X, **more}


CAUSES: dict[str, tuple[str, Callable[[Any, Any], Any], tuple[Any, Any]]] = {
    "bare": ("'...' is trained, but ...", step_of(tx=BARE), example()),
    "twice": (
        "a distributed_optimizer updates inside another one",
        step_of(tx=jf.distributed_optimizer(TX)),
        example(),
    ),
    "alone": (
        "... returns ..., not (state, metrics)",
        step_of(result=lambda *both: both[0]),
        example(),
    ),
    "type": (
        "the state leaf '...' goes in as ... and comes out as ...",
        step_of(result=lambda state, loss: ({**state, "n": state["n"] + 0.5}, loss)),
        ({**example()[0], "n": jnp.int32(0)}, example()[1]),
    ),
    "structure": (
        "the state comes back with another structure: ...",
        step_of(result=lambda state, loss: ({**state, "epoch": jnp.int32(1)}, loss)),
        example(),
    ),
    "raw key": (
        "the batch's leaves differ in their leading axis: ...",
        step_of(),
        example(key=np.zeros(2, np.uint32)),
    ),
    "scalars": (
        "the batch has no leaf with rows",
        step_of(),
        (example()[0], {"x": jnp.float32(1)}),
    ),
    "print": (
        "the training step has a side effect: ...",
        step_of(lambda batch: jax.debug.print("{}", batch["x"].sum())),
        example(),
    ),
    "callback": (
        "the training step calls back into Python: ...",
        step_of(result=lambda state, loss: (state, jax.pure_callback(lambda x: x, loss, loss))),
        example(),
    ),
    "computed keys": (
        "the keys of table '...' are ...",
        step_of(
            loss=lambda p, batch: jnp.mean(TABLE(p["ids"], batch["ids"] + 1)) + jnp.mean(p["w"])
        ),
        example(params={"ids": TABLE.init()}, ids=np.arange(8)),
    ),
    "vmapped look-up": (
        "a table is looked up inside vmap",
        step_of(
            loss=lambda p, batch: (
                jnp.mean(jax.vmap(lambda ids: TABLE(p["ids"], ids))(batch["ids"]))
                + jnp.mean(p["w"])
            )
        ),
        example(params={"ids": TABLE.init()}, ids=np.arange(8)),
    ),
    "placed": (
        "the training step places a value on devices by hand: ...",
        step_of(
            result=lambda state, loss: (
                state,
                jax.lax.with_sharding_constraint(
                    loss, jax.sharding.SingleDeviceSharding(jax.devices()[0])
                ),
            ),
        ),
        example(),
    ),
    "pmean": (
        "the step reduces over devices by hand: ...",
        step_of(result=lambda state, loss: (state, jax.lax.pmean(loss, "batch"))),
        example(),
    ),
    "numpy's random": (
        "the step computes '...' in another way each time it is traced",
        step_of(result=lambda state, loss: (state, loss * np.random.default_rng().random())),
        example(),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_raises_its_message(cause: str) -> None:
    message, step, arguments = CAUSES[cause]
    assert message in quoted_messages()
    with pytest.raises(JaxfleetError) as raised:
        jf.distribute(step, arguments)
    assert is_made_of(message, str(raised.value)), str(raised.value)


def test_calls_that_do_not_fit_raise_their_messages() -> None:
    state, batch = example()
    step = jf.distribute(step_of(), (state, batch), jf.DistributedStrategy(devices=4))
    message = "a batch of ... rows cannot be divided among ... ..."
    with pytest.raises(JaxfleetError) as raised:
        step(state, {"x": X[:6]})
    assert message in quoted_messages()
    assert is_made_of(message, str(raised.value))
    message = "'...' is fed ..., but it is ..."
    with pytest.raises(JaxfleetError) as raised:
        step(state, {"x": X.astype(np.int32)})
    assert message in quoted_messages()
    assert is_made_of(message, str(raised.value))


def test_a_state_that_was_used_raises_its_message() -> None:
    state, batch = example()
    step = jf.distribute(step_of(), (state, batch), jf.DistributedStrategy(devices=4))
    newer, _ = step(state, batch)
    step(newer, batch)
    message = "the ... was used before: the last step took its memory"
    with pytest.raises(JaxfleetError) as raised:
        step(newer, batch)
    assert message in quoted_messages()
    assert is_made_of(message, str(raised.value))
