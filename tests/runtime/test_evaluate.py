"""step.evaluate runs a function of the user's on the current state, in every mode."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.capture.embedding.tables import EmbeddingTable
from jaxfleet.errors import CaptureError, FeedError
from jaxfleet.ps.client.client import Client
from jaxfleet.runtime.step_state import Handle
from jaxfleet.runtime.trainer_step import TrainerStep

TX = jf.distributed_optimizer(optax.adam(0.1))
RANDOM = np.random.default_rng(0)
USERS = jf.embedding_table("users", 3, optimizer=jf.tables.Sgd(0.1))
FAR_KEYS = np.asarray([[2**40 + 7, 3], [5, 2**40 + 7], [3, 3], [9, 1]], dtype=np.int64)


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def predict(state: Any, batch: Any) -> Any:
    return {"said": batch["x"] @ state["params"]["w"], "sum": state["params"]["w"].sum()}


def example() -> tuple[Any, Any]:
    params = {"w": jnp.asarray([1.0, -2.0, 0.5])}
    batch = {"x": RANDOM.normal(size=(8, 3)).astype("f4"), "y": np.ones(8, "f4")}
    return {"params": params, "opt": TX.init(params)}, batch


def trained(devices: int) -> tuple[jf.Step, Any, Any]:
    state, batch = example()
    step = jf.distribute(train_step, (state, batch), jf.DistributedStrategy(devices=devices))
    assert isinstance(step, jf.Step)
    for _ in range(2):
        state, _ = step(state, batch)
    return step, state, batch


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("devices", [1, 4])
def test_devices_evaluate_any_number_of_rows(devices: int, rows: int) -> None:
    step, state, batch = trained(devices)
    held_out = {"x": RANDOM.normal(size=(rows, 3)).astype("f4")}
    found = step.evaluate(predict, state, held_out)
    w = np.asarray(state["params"]["w"])
    np.testing.assert_allclose(found["said"], held_out["x"] @ w, rtol=1e-5)
    np.testing.assert_allclose(found["sum"], w.sum(), rtol=1e-5)
    step(state, batch)  # the state is still whole


def test_a_state_whose_memory_a_step_took_is_named() -> None:
    step, state, batch = trained(4)
    step(state, batch)
    with pytest.raises(FeedError, match="state"):
        step.evaluate(predict, state, batch)


def test_another_structure_than_the_steps_state_is_refused() -> None:
    step, state, batch = trained(1)
    with pytest.raises(
        FeedError, match="evaluate: the state has another structure than the step's: it was"
    ):
        step.evaluate(predict, {"params": state["params"]}, batch)


@pytest.mark.parametrize("communication", ["sync", "async"])
def test_a_trainer_brings_only_what_the_function_reads(
    monkeypatch: pytest.MonkeyPatch, communication: Any
) -> None:
    state, batch = example()
    strategy = jf.DistributedStrategy(mode="pserver", communication=communication)
    twin = jf.Twin(train_step, (state, batch), strategy, servers=2, trainers=1)

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        now, _ = step(state, batch)
        assert isinstance(now["opt"][0].mu["w"], Handle)
        pulled: list[list[str]] = []
        pull = step._served.pull  # noqa: SLF001

        def noting(client: Client, names: Sequence[str]) -> dict[str, Any]:
            pulled.append(list(names))
            return pull(client, names)

        monkeypatch.setattr(step._served, "pull", noting)  # noqa: SLF001
        said = step.evaluate(predict, now, batch)["said"]
        momentum = step.evaluate(lambda s, _: s["opt"][0].mu["w"], now, ())
        newest = [] if communication == "sync" else [["params/w"]]
        assert pulled == [*newest, ["opt/0/mu/w"]]
        full = step.pull(now)
        np.testing.assert_allclose(said, batch["x"] @ full["params"]["w"], rtol=1e-5)
        np.testing.assert_array_equal(momentum, full["opt"][0].mu["w"])
        return full, ()

    twin.play(script)


def test_one_trainer_may_evaluate_while_another_goes_on() -> None:
    state, batch = example()
    strategy = jf.DistributedStrategy(mode="pserver")
    twin = jf.Twin(train_step, (state, batch), strategy, servers=2, trainers=2)

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        now = state
        for number in range(3):
            now, _ = step(now, batch)
            if step.client.me.trainer == 0 and number == 1:
                momentum = step.evaluate(lambda s, _: s["opt"][0].mu["w"], now, ())
                assert np.abs(momentum).max() > 0
        return step.pull(now), ()

    first, second = twin.play(script).states
    np.testing.assert_array_equal(first["params"]["w"], second["params"]["w"])


def table_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(USERS(params["users"], batch["ids"]).sum((1, 2)) - 1.0))

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def look_up(state: Any, batch: Any) -> jax.Array:
    return USERS(state["params"]["users"], batch["ids"]) * 2.0


def table_example() -> tuple[Any, Any]:
    params = {"users": USERS.init()}
    return {"params": params, "opt": TX.init(params)}, {"ids": FAR_KEYS}


def test_a_function_looks_up_rows_of_keys_that_need_64_bits() -> None:
    state, batch = table_example()
    step = jf.distribute(table_step, (state, batch), jf.DistributedStrategy(devices=2))
    assert isinstance(step, jf.Step)
    state, _ = step(state, batch)
    found = step.evaluate(look_up, state, batch)
    np.testing.assert_array_equal(found, 2 * step.look_up("users", FAR_KEYS))
    assert np.abs(found[0, 0] - found[0, 1]).max() > 0


def test_servers_give_rows_to_a_function() -> None:
    state, batch = table_example()
    twin = jf.Twin(table_step, (state, batch), servers=2, trainers=1)

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        now, _ = step(state, batch)
        found = step.evaluate(look_up, now, batch)
        np.testing.assert_array_equal(found, 2 * step.look_up("users", FAR_KEYS))
        return now["params"], ()

    twin.play(script)


UNSEEN = np.array([[100, 2**50], [-7, 101]])


def table_step_of(users: EmbeddingTable) -> tuple[Any, Any, Any]:
    """Returns a step that trains a table, and its example."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean(jnp.square(users(params["users"], batch["ids"]).sum((1, 2)) - 1.0))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = {"users": users.init()}
    return step, {"params": params, "opt": TX.init(params)}, {"ids": FAR_KEYS}


def check_nothing_kept(step: Any, state: Any, users: EmbeddingTable) -> None:
    before = step.stats()["tables"]["users"]
    found = step.evaluate(lambda s, b: users(s["params"]["users"], b), state, UNSEEN)
    np.testing.assert_array_equal(found, step.look_up("users", UNSEEN))
    after = step.stats()["tables"]["users"]
    assert after["rows"] == before["rows"] == len(np.unique(FAR_KEYS))
    assert after["bytes_live"] == before["bytes_live"]


def trained_rows(
    step: Any, state: Any, batch: Any, users: EmbeddingTable, *, evaluates: bool
) -> np.ndarray:
    """Trains a table, evaluates keys that it has not met or not, and trains those."""
    for _ in range(3):
        state, _ = step(state, batch)
        if evaluates:
            check_nothing_kept(step, state, users)
    state, _ = step(state, {"ids": np.concatenate([UNSEEN, UNSEEN])})
    rows: np.ndarray = step.look_up("users", [*FAR_KEYS, *UNSEEN])
    return rows


def table_of(memory_rows: int | None) -> EmbeddingTable:
    rule, bound = jf.tables.Adagrad(0.1), jf.tables.Capacity(1 << 16)
    return jf.embedding_table("users", 3, optimizer=rule, evictions=bound, memory_rows=memory_rows)


@pytest.mark.parametrize("memory_rows", [None, 2])
def test_an_evaluation_keeps_no_row_and_changes_no_later_step(memory_rows: int | None) -> None:
    """Rows of keys that only evaluations meet would exceed the capacity, and grow for ever."""
    users = table_of(memory_rows)
    step, state, batch = table_step_of(users)

    def rows_after(*, evaluates: bool) -> np.ndarray:
        one = jf.distribute(step, (state, batch), jf.DistributedStrategy(devices=1, donate=False))
        return trained_rows(one, state, batch, users, evaluates=evaluates)

    np.testing.assert_array_equal(rows_after(evaluates=True), rows_after(evaluates=False))


@pytest.mark.few(1)
@pytest.mark.parametrize("memory_rows", [None, 2])
def test_an_evaluation_keeps_no_row_on_servers(memory_rows: int | None) -> None:
    users = table_of(memory_rows)
    step, state, batch = table_step_of(users)

    def rows_after(*, evaluates: bool) -> Any:
        def script(one: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
            return trained_rows(one, state, batch, users, evaluates=evaluates), ()

        return jf.Twin(step, (state, batch), servers=2, trainers=1).play(script).states[0]

    np.testing.assert_array_equal(rows_after(evaluates=True), rows_after(evaluates=False))


def test_keys_that_are_computed_inside_the_function_are_refused() -> None:
    state, batch = table_example()
    step = jf.distribute(table_step, (state, batch), jf.DistributedStrategy(devices=1))
    assert isinstance(step, jf.Step)
    with pytest.raises(CaptureError, match="keys that are no leaf of the batch"):
        step.evaluate(lambda s, b: USERS(s["params"]["users"], b["ids"] + 1), state, batch)


def test_a_dropped_argument_of_a_wrapped_function_is_not_read() -> None:
    step, _, _ = trained(1)
    ignoring = jax.jit(lambda params, _: params["w"] * 2)
    reads, _ = step._evaluator._compiled(  # noqa: SLF001
        lambda s, _: ignoring(s["params"], s["opt"]), [], jax.tree_util.tree_structure(())
    )
    names = [leaf.name for leaf in step.captured.signature.state]
    assert [names[at] for at in reads.leaves] == ["params/w"]


def test_a_step_of_several_arguments_evaluates_functions_of_several() -> None:
    def step(params: Any, opt: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(x @ p["w"] - y).mean())(params)
        updates, opt = TX.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    state, batch = example()
    args = state["params"], state["opt"], batch["x"], batch["y"]
    made: Any = jf.distribute(step, args, jf.DistributedStrategy(devices=2))
    params, opt, _ = made(*args)

    def error(params: Any, opt: Any, x: Any, y: Any) -> Any:
        return jnp.abs(x @ params["w"] - y).max() + opt[0].count

    def of_pair(state: Any, batch: Any) -> Any:
        return error(*state, *batch)

    x, y = batch["x"], batch["y"]
    found = made.evaluate(error, params, opt, x, y)
    assert found == made.evaluate(of_pair, (params, opt), (x, y))
    np.testing.assert_allclose(found, error(params, opt, x, y), rtol=1e-6)
    with pytest.raises(FeedError, match="with 1 values behind the function"):
        made.evaluate(error, params)


def test_a_step_of_a_state_and_a_batch_asks_for_a_tuple_of_several() -> None:
    step, state, batch = trained(1)
    evaluate: Any = step.evaluate
    with pytest.raises(FeedError, match="one batch, and 1 more were given") as refused:
        evaluate(predict, state, batch["x"], batch["y"])
    assert "pass a tuple: step.evaluate(function, state, (x, y))" in str(refused.value.hint)
