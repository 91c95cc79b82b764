"""Steps of several arguments: state, batch, and arguments replicated to every device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, FeedError
from jaxfleet.runtime.distribution import with_arguments

DEVICES = 4
STEPS = 3
TX = jf.distributed_optimizer(optax.adam(0.1))


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, Y = drawn(8, 4), drawn(8, 2, seed=1)


def params() -> dict[str, jax.Array]:
    return {"b": jnp.zeros(2), "w": jnp.ones((4, 2))}


def loss(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.square(x @ params["w"] + params["b"] - y).mean()


def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def keyed_step(state: Any, batch: Any, rng: Any) -> Any:
    keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    params, opt_state, value = train_step(state[0], state[1], batch["x"] * keep, batch["y"])
    return (params, opt_state), {"loss": value}


def distributed(step: Any, *example: Any) -> Any:
    strategy = jf.DistributedStrategy(devices=DEVICES, donate=False)
    return jf.distribute(step, example=example, strategy=strategy)


def close(found: Any, expected: Any) -> None:
    jax.tree.map(  # raises if their structures differ
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected
    )


def test_a_step_of_parameters_and_optimizer_state_returns_what_the_users_does() -> None:
    found = expected = (params(), TX.init(params()))
    step = distributed(train_step, *found, X, Y)
    for _ in range(STEPS):
        *found, value = step(*found, X, Y)
        *expected, wanted = train_step(*expected, X, Y)
        close((tuple(found), value), (tuple(expected), wanted))
    assert "state: params, opt_state; batch: x, y" in step.explain()


def test_arguments_may_come_by_name_and_another_batch_size_too() -> None:
    state = (params(), TX.init(params()))
    step = distributed(train_step, *state, X, Y)
    close(step(*state, y=Y[:4], x=X[:4]), train_step(*state, X[:4], Y[:4]))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_goes_whole_to_every_device_and_another_one_at_every_step(make_key: Any) -> None:
    found = expected = (params(), TX.init(params()))
    batch = {"x": X, "y": Y}
    step = distributed(keyed_step, found, batch, make_key(0))
    losses = set()
    for number in range(STEPS):
        found, metrics = step(found, batch, make_key(number))
        expected, wanted = keyed_step(expected, batch, make_key(number))
        close((found, metrics), (expected, wanted))
        losses.add(float(metrics["loss"]))
    assert len(losses) == STEPS
    assert "; batch: batch; whole: rng\n" in step.explain()


def test_a_step_with_a_key_names_its_leaves_as_the_step_without_one() -> None:
    state, batch = (params(), TX.init(params())), {"x": X, "y": Y}

    def pair(state: Any, batch: Any) -> Any:
        return keyed_step(state, batch, jax.random.key(0))

    with_key = jf.capture(keyed_step, example=(state, batch, jax.random.key(0)))
    without = jf.capture(pair, example=(state, batch))
    names = [leaf.name for leaf in without.signature.state]
    assert [leaf.name for leaf in with_key.signature.state] == names


def test_metrics_may_come_first_and_the_optimizers_state_behind_the_batch() -> None:
    def step(params: Any, x: Any, y: Any, opt_state: Any) -> Any:
        params, opt_state, value = train_step(params, opt_state, x, y)
        return value, (params, opt_state), {"rows": x.shape[0]}

    state = params(), TX.init(params())
    close(distributed(step, state[0], X, Y, state[1])(state[0], X, Y, state[1]),
          step(state[0], X, Y, state[1]))  # fmt: skip


def test_an_argument_that_is_read_and_has_no_rows_is_kept_whole_and_never_taken() -> None:
    def step(params: Any, opt_state: Any, teacher: Any, x: Any) -> Any:
        return train_step(params, opt_state, x, x @ teacher["w"])

    state, teacher = (params(), TX.init(params())), {"w": jnp.ones((4, 2)), "bias": jnp.ones(3)}
    made = jf.distribute(
        step, (state[0], state[1], teacher, X), jf.DistributedStrategy(devices=DEVICES)
    )
    found = jax.tree.map(jnp.copy, state)
    expected = state
    for _ in range(STEPS):
        *found, value = made(*found, teacher, X)
        *expected, wanted = step(*expected, teacher, X)
        close(value, wanted)
    close(teacher, {"w": jnp.ones((4, 2)), "bias": jnp.ones(3)})


def test_a_learning_rate_is_not_taken_for_state_by_the_loss_that_looks_like_it() -> None:
    def step(params: Any, rate: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads, _ = TX.update(grads, TX.init(params), params)
        return jax.tree.map(lambda p, g: p + rate * g, params, grads), value

    captured = jf.capture(step, example=(params(), jnp.float32(0.1), X, Y))
    assert captured.arguments is not None
    assert (captured.arguments.state, captured.arguments.batch) == (("params",), ("rate", "x", "y"))


def test_a_batch_that_comes_back_reconstructed_is_no_state() -> None:
    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        params, opt_state, _ = train_step(params, opt_state, x, y)
        return params, opt_state, 2 * x

    captured = jf.capture(step, example=(params(), TX.init(params()), X, Y))
    assert captured.arguments is not None
    assert captured.arguments.state == ("params", "opt_state")


def test_several_arguments_of_state_are_saved_and_restored_together(tmp_path: Path) -> None:
    state = (params(), TX.init(params()))
    step = distributed(train_step, *state, X, Y)
    *state, _ = step(*state, X, Y)
    step.save(tmp_path / "saved", tuple(state))
    close(step.restore(tmp_path / "saved"), tuple(state))
    close(step.pull(tuple(state)), tuple(state))


def test_a_step_of_several_arguments_runs_on_trainers_and_servers() -> None:
    state = (params(), TX.init(params()))
    captured = jf.capture(train_step, example=(*state, X, Y))
    assert captured.arguments is not None
    start, batch = captured.arguments.split((*state, X, Y))
    result = jf.Twin(captured, servers=1, trainers=2).run(start, [batch])
    close(result.states[0]["params"], train_step(*state, X, Y)[0])


def test_the_inner_step_is_told_that_the_script_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says no bye to servers then, and has them write no last checkpoint."""
    step = jf.distribute(train_step, example=(params(), TX.init(params()), X, Y))
    seen: list[Any] = []
    monkeypatch.setattr(type(step.step), "__exit__", lambda _, *error: seen.append(error[0]))
    with pytest.raises(KeyError), step:
        raise KeyError("x")
    with step:
        pass
    assert seen == [KeyError, None]


def test_a_step_of_several_arguments_is_saved_and_restored_by_servers(tmp_path: Path) -> None:
    state = (params(), TX.init(params()))
    captured = jf.capture(train_step, example=(*state, X, Y))

    def script(inner: Any) -> tuple[Any, tuple[Any, ...]]:
        step = with_arguments(inner, captured, (*state, X, Y))
        *after, _ = step(*step.place(state), X, Y)
        step.save(tmp_path / "saved", tuple(after))
        full = step.pull(tuple(after))
        close(step.pull(step.restore(tmp_path / "saved")), full)
        return full, ()

    strategy = jf.DistributedStrategy(mode="pserver", min_block_size=1)
    twin = jf.Twin(captured, strategy=strategy, servers=2, trainers=1)
    twin.play(script, checkpoint_dir=tmp_path / "own")


def test_a_step_that_returns_no_new_state_is_told_what_it_returns() -> None:
    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        return loss(params, x, y)

    with pytest.raises(CaptureError, match="returns nothing that 'params' could become: an array"):
        jf.capture(step, example=(params(), TX.init(params()), X, Y))


def test_an_argument_that_is_not_an_array_is_named() -> None:
    def step(params: Any, mode: Any, x: Any, y: Any) -> Any:
        return params, loss(params, x, y)

    with pytest.raises(CaptureError, match="'argument/mode' is of type str") as caught:
        jf.capture(step, example=(params(), "train", X, Y))
    assert "functools.partial" in "".join(caught.value.__notes__)


def test_a_call_with_other_arguments_names_them() -> None:
    state = (params(), TX.init(params()))
    step = distributed(train_step, *state, X, Y)
    with pytest.raises(FeedError, match=r"^the step is called without y"):
        step(*state, X)
    with pytest.raises(FeedError, match="called without y and with an unknown or repeated x, z"):
        step(*state, X, x=X, z=Y)
    with pytest.raises(FeedError, match="with 5 arguments instead of 4"):
        step(*state, X, Y, Y)


def test_an_optimizer_state_without_arrays_is_state_too() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    made = distributed(step, params(), tx.init(params()), X, Y)
    assert "state: params, opt_state; batch: x, y" in made.explain()
    assert len(made(params(), tx.init(params()), X, Y)) == 3
