"""Mistakes with lookups in tables."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, FeedError, ProgramError
from tests.mistakes.common import refused

USERS = jf.embedding_table("users", 4)
BATCH: dict[str, Any] = {"ids": np.arange(6).reshape(2, 3), "y": np.ones(2, np.float32)}

LookUp = Callable[[Any, Any], Any]


def same(grads: Any) -> Any:
    return grads


def stepped(look_up: LookUp, change: Callable[[Any], Any] = same) -> tuple[Any, Any]:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            return jnp.sum(look_up(params, batch) * params["w"])

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(change(grads), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = {"users": USERS.init(), "w": jnp.ones(4)}
    return train_step, {"params": params, "opt": tx.init(params)}


def captured(look_up: LookUp, change: Callable[[Any], Any] = same) -> jf.Captured:
    step, state = stepped(look_up, change)
    return jf.capture(step, example=(state, BATCH))


@pytest.mark.parametrize(
    "keys",
    [
        lambda ids: ids + 1,
        lambda ids: ids[:, 0],
        lambda ids: ids.reshape(-1),
        lambda ids: jnp.where(ids > 1, ids, 0),
        jnp.zeros_like,
    ],
    ids=["added", "cut", "reshaped", "chosen", "made"],
)
def test_keys_that_the_step_computes(keys: Callable[[Any], Any]) -> None:
    with refused(
        CaptureError,
        cause="the keys of table 'users' are computed by the step",
        line='captured(lambda params, batch: USERS(params["users"], keys(batch["ids"])))',
        hint="put them into the batch as a leaf of their own",
    ):
        captured(lambda params, batch: USERS(params["users"], keys(batch["ids"])))


def test_a_look_up_outside_of_a_step() -> None:
    with refused(
        CaptureError,
        cause="the table 'users' is looked up outside of a step",
        line='USERS(USERS.init(), BATCH["ids"])',
        hint="step.evaluate(function, state, batch) runs a function that looks rows up",
    ):
        USERS(USERS.init(), BATCH["ids"])


def test_a_look_up_inside_vmap() -> None:
    def look_up(params: Any, batch: Any) -> Any:
        return jax.vmap(lambda ids: USERS(params["users"], ids))(batch["ids"])

    with refused(
        CaptureError,
        cause="a table is looked up inside vmap",
        line='return jax.vmap(lambda ids: USERS(params["users"], ids))(batch["ids"])',
        hint="look up the whole array of ids before it",
    ):
        captured(look_up)


def test_a_look_up_inside_a_loop() -> None:
    def look_up(params: Any, batch: Any) -> Any:
        def turn(total: Any, _: Any) -> Any:
            return total + USERS(params["users"], batch["ids"]).sum((0, 1)), None

        return jax.lax.scan(turn, jnp.zeros(4), None, length=2)[0]

    with refused(
        CaptureError,
        cause="the table 'users' is looked up inside a loop or a branch",
        line='return total + USERS(params["users"], batch["ids"]).sum((0, 1)), None',
        hint="look up all ids before it",
    ):
        captured(look_up)


def test_gradients_that_are_scaled_by_hand() -> None:
    def scaled(grads: Any) -> Any:
        return jax.tree.map(lambda g: 0.5 * g, grads)

    with refused(
        CaptureError,
        cause="the gradient of a table's handle is changed before the optimizer gets it",
        line="return jax.tree.map(lambda g: 0.5 * g, grads)",
        hint="scale the loss",
    ):
        captured(lambda params, batch: USERS(params["users"], batch["ids"]), scaled)


def looked_at(params: Any, batch: Any) -> Any:
    return USERS(params["users"], batch["ids"])


def test_gradients_that_a_branch_may_skip() -> None:
    def skipped(grads: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, grads)
        return jax.lax.cond(grads["w"][0] > 0, lambda: zeros, lambda: grads)

    with refused(
        CaptureError,
        cause="the gradient of a table's handle is changed before the optimizer gets it",
        line='return jax.lax.cond(grads["w"][0] > 0, lambda: zeros, lambda: grads)',
        hint="scale the loss",
    ):
        captured(looked_at, skipped)


def test_a_gradient_that_is_left_out() -> None:
    def left_out(grads: Any) -> Any:
        return {**grads, "users": jnp.zeros(())}

    with refused(
        CaptureError,
        cause="a gradient of the table 'users' does not reach the optimizer",
        line='return USERS(params["users"], batch["ids"])',
        hint="takes jax.lax.stop_gradient(handle)",
    ):
        captured(looked_at, left_out)


def test_a_parameter_in_the_place_of_the_handle() -> None:
    with refused(
        CaptureError,
        cause="table 'users': the handle is float32[], and this is float32[4]",
        line='captured(lambda params, batch: USERS(params["w"], batch["ids"]))',
        hint="with users.init() among the parameters",
    ):
        captured(lambda params, batch: USERS(params["w"], batch["ids"]))


def test_a_number_in_the_place_of_the_handle() -> None:
    with refused(
        CaptureError,
        cause="the handle of table 'users' is a number, so nothing trains it",
        line='captured(lambda _, batch: USERS(np.float32(0), batch["ids"]))',
        hint="jax.lax.stop_gradient(handle) freezes it",
    ):
        captured(lambda _, batch: USERS(np.float32(0), batch["ids"]))


def test_keys_that_are_no_integers() -> None:
    with refused(
        CaptureError,
        cause="table 'users': keys are integers, and these are float32",
        line='captured(lambda params, batch: USERS(params["users"], batch["y"]))',
        hint="look up a leaf of integers",
    ):
        captured(lambda params, batch: USERS(params["users"], batch["y"]))


def test_two_tables_of_one_name() -> None:
    other = jf.embedding_table("users", 4, optimizer=jf.tables.Sgd(0.5))

    def look_up(params: Any, batch: Any) -> Any:
        return USERS(params["users"], batch["ids"]) + other(params["users"], batch["ids"])

    with refused(
        CaptureError,
        cause="two tables are called 'users', and they differ",
        line='return USERS(params["users"], batch["ids"]) + other(params["users"], batch["ids"])',
        hint="give each a name of its own",
    ):
        captured(look_up)


@pytest.mark.parametrize(
    ("dim", "says"), [(0, "dim is 0"), (2.5, "dim is 2.5")], ids=["none", "no number"]
)
def test_a_dim_that_is_none(dim: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        jf.embedding_table("users", dim)


def test_keys_that_the_device_would_see_as_other_numbers() -> None:
    step, state = stepped(lambda p, b: USERS(p["users"], b["ids"]) * b["ids"][..., None])
    run: Any = jf.distribute(step, (state, BATCH), "single")
    run(jax.tree.map(jnp.copy, state), BATCH)
    with pytest.raises(FeedError, match=r"'batch/ids' has a key of 1099511627781") as found:
        run(jax.tree.map(jnp.copy, state), {**BATCH, "ids": BATCH["ids"] + 2**40})
    assert "a leaf of its own" in "".join(found.value.__notes__)


def test_keys_are_called_what_they_are_where_the_device_sees_them_too() -> None:
    step, state = stepped(lambda p, b: USERS(p["users"], b["ids"]) * b["ids"][..., None])
    run: Any = jf.distribute(step, (state, BATCH), "single")
    for dtype, says in (
        ("uint64", "fed uint64, which jax takes as u32, but it is i32"),
        (">i8", "fed int64 of the other order of bytes, but it is i32"),
    ):
        with pytest.raises(FeedError, match=says):
            run(jax.tree.map(jnp.copy, state), {**BATCH, "ids": BATCH["ids"].astype(dtype)})


def test_a_key_that_is_no_int64() -> None:
    step, state = stepped(lambda p, b: USERS(p["users"], b["ids"]))
    large = {**BATCH, "ids": BATCH["ids"].astype(np.uint64) + np.uint64(2**63)}
    run: Any = jf.distribute(step, (state, large), "single")
    with pytest.raises(FeedError, match="which is not an int64"):
        run(state, large)


def test_a_gradient_that_is_no_number() -> None:
    step, state = stepped(lambda p, b: USERS(p["users"], b["ids"]) / b["y"][0])
    run: Any = jf.distribute(step, (state, BATCH), "single")
    with pytest.raises(ProgramError, match="users"):
        run(state, {**BATCH, "y": np.zeros(2, np.float32)})
    assert len(run.tables.stores["users"]) == 6


def test_keys_that_are_a_list() -> None:
    batch = {**BATCH, "ids": [0, 1]}
    step, state = stepped(lambda params, batch: USERS(params["users"], batch["ids"]))
    with refused(
        CaptureError,
        cause="table 'users': keys are one array of integers, and this is list",
        line='stepped(lambda params, batch: USERS(params["users"], batch["ids"]))',
        hint="np.asarray(keys)",
    ):
        jf.capture(step, example=(state, batch))


@pytest.mark.parametrize(
    "parts",
    [
        {"optimizer": jf.tables.Normal()},
        {"optimizer": jf.tables.Adagrad},
        {"optimizer": optax.sgd(0.1)},
        {"initializer": jf.tables.Sgd()},
        {"admission": jf.tables.Capacity()},
        {"evictions": jf.tables.AfterCount()},
        {"evictions": 3},
    ],
    ids=["initializer", "class", "optax", "optimizer", "eviction", "admission", "number"],
)
def test_a_part_in_the_place_of_another(parts: dict[str, Any]) -> None:
    ((role, _),) = parts.items()
    with pytest.raises(
        ProgramError, match=f"is no {role.removesuffix('s')} of jf.tables"
    ) as caught:
        jf.embedding_table("users", 4, **parts)
    kind = {"optimizer": "Sgd", "initializer": "Uniform", "admission": "AfterCount"}
    assert f"jf.tables.{kind.get(role, 'Unseen')}()" in caught.value.__notes__[0]


def test_a_table_says_its_name_and_dim() -> None:
    assert (USERS.name, USERS.dim) == ("users", 4)
