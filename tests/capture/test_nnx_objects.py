"""Steps that change nnx objects in place, and return the loss alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxfleet as jf
from jaxfleet.capture.nnx_objects import check_shared, has_objects
from jaxfleet.errors import CaptureError, FeedError
from jaxfleet.runtime.distribution import with_arguments

DEVICES = 2
PLAIN = optax.adam(0.1)
TX = jf.distributed_optimizer(PLAIN)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def objects(tx: Any) -> tuple[Any, Any, Any]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def loss_of(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def batches(count: int = 3) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    sizes = {"x": (8, 4), "y": (8, 2)}
    return [
        {name: random.normal(size=size).astype("f4") for name, size in sizes.items()}
        for _ in range(count)
    ]


def close(found: Any, expected: Any) -> None:
    """Compares the leaves of objects: their static attributes hold different optimizers."""
    leaves = map(jax.tree.leaves, (found, expected))
    for x, y in zip(*leaves, strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def one_device() -> tuple[list[Any], tuple[Any, Any, Any]]:
    """The losses of three steps under `nnx.jit`, and the objects after them."""
    changed, step = objects(PLAIN), nnx.jit(train_step)
    return [step(*changed, batch) for batch in batches()], changed


@pytest.mark.few(1)
@pytest.mark.parametrize("jit", [nnx.jit, lambda step: step], ids=["jit", "plain"])
def test_objects_are_changed_in_place(jit: Callable[..., Any], one_device: Any) -> None:
    losses, expected = one_device
    model, *more = objects(TX)
    part, strategy = model.first, jf.DistributedStrategy(devices=DEVICES)
    step = jf.distribute(jit(train_step), (model, *more, batches()[0]), strategy)
    found = [step(model, *more, batch) for batch in batches()]
    close(found, losses)
    close((model, *more), expected)
    assert model.first is part
    assert float(more[1].compute()["loss"]) == pytest.approx(float(np.mean(losses)))
    assert "state: model, optimizer, metrics; batch: batch" in step.explain()


@pytest.mark.grid
def test_an_object_that_holds_them_all_may_be_the_only_argument_besides_the_batch(
    one_device: Any,
) -> None:
    class Trainer(nnx.Module):
        def __init__(self) -> None:
            self.model, self.optimizer, self.metrics = objects(TX)

    def whole_step(trainer: Any, batch: Any) -> Any:
        return train_step(trainer.model, trainer.optimizer, trainer.metrics, batch)

    trainer, losses = Trainer(), one_device[0]
    step = jf.distribute(whole_step, (trainer, batches()[0]), "single")
    close([step(trainer, batch) for batch in batches()], losses)


def test_an_object_that_is_only_read_may_come_first() -> None:
    def distil(teacher: Any, model: Any, optimizer: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return jnp.square(model(batch["x"]) - teacher(batch["x"])).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    def start(tx: Any) -> Any:
        teacher, model = (nnx.Linear(4, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        return teacher, model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    found, expected, jitted = start(TX), start(PLAIN), nnx.jit(distil)
    step = jf.distribute(distil, (*found, batches()[0]), jf.DistributedStrategy(devices=DEVICES))
    for batch in batches():
        close(step(*found, batch), jitted(*expected, batch))
    close(found, expected)
    assert "state: model, optimizer; batch: batch; whole: teacher" in step.explain()


def test_a_teacher_that_the_script_changes_between_steps_is_the_new_one() -> None:
    def distil(model: Any, optimizer: Any, teacher: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return jnp.square(model(batch["x"]) - teacher(batch["x"])).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    def start(tx: Any) -> Any:
        model, teacher = (nnx.Linear(4, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), teacher

    found, expected, jitted = start(TX), start(PLAIN), nnx.jit(distil)
    step = jf.distribute(distil, (*found, batches()[0]), "single")
    for batch in batches():
        close(step(*found, batch), jitted(*expected, batch))
        for model, _, teacher in (found, expected):
            nnx.update(teacher, jax.tree.map(lambda x, y: x + y, *map(nnx.state, (teacher, model))))
    evaluated = step.evaluate(lambda *args: args[-2].kernel[...], *found[:2], found[2], batch)
    close(evaluated, expected[2].kernel[...])


def test_an_array_beside_objects_that_is_not_returned_is_refused() -> None:
    def counting(parts: Any, optimizer: Any, batch: Any) -> Any:
        parts["count"] += 1
        loss, grads = nnx.value_and_grad(loss_of)(parts["model"], batch)
        optimizer.update(parts["model"], grads)
        return loss

    model, optimizer, _ = objects(TX)
    parts = {"model": model, "count": jnp.zeros(())}
    with pytest.raises(CaptureError, match="replaces an array of 'parts' that is not an nnx ob"):
        jf.capture(counting, example=(parts, optimizer, batches()[0]))


@pytest.mark.grid
def test_trainers_and_servers_change_them_in_place_too(one_device: Any) -> None:
    losses, expected = one_device
    captured = jf.capture(train_step, example=(*objects(TX), batches()[0]))

    def evaluated(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
        model.eval()
        return loss_of(model, batch)

    def script(inner: Any) -> tuple[Any, Any]:
        changed = objects(TX)
        step = with_arguments(inner, captured, (*changed, batches()[0]))
        found = [step(*changed, batch) for batch in batches()]
        value = step.evaluate(evaluated, *changed, batches()[0])
        assert not changed[0].norm.use_running_average
        return step.pull(changed), (*found, value)

    strategy = jf.DistributedStrategy(mode="pserver", min_block_size=1)
    result = jf.Twin(captured, strategy=strategy, servers=2, trainers=2).play(script)
    close(result.states[0], expected)
    model = nnx.clone(expected[0])
    model.eval()
    close(result.metrics[0], (*losses, loss_of(model, batches()[0])))


@pytest.mark.few(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_in_training_mode_may_be_evaluated(devices: int) -> None:
    state, batch = objects(TX), batches()[0]
    step = jf.distribute(train_step, (*state, batch), jf.DistributedStrategy(devices=devices))
    step(*state, batch)

    def evaluated(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
        del optimizer, metrics
        return model.norm(model.first(batch["x"])), model.dropout(batch["x"]).shape

    model = nnx.clone(state[0])
    found, _ = step.evaluate(evaluated, *state, batch)
    close(found, model.norm(model.first(batch["x"])))


def test_restored_objects_are_new_ones(tmp_path: Path) -> None:
    state = objects(TX)
    step = jf.distribute(train_step, (*state, batches()[0]), "single")
    step(*state, batches()[0])
    step.save(tmp_path / "saved", state)
    kept = jax.tree.map(jnp.copy, state)
    step(*state, batches()[1])
    restored = step.restore(tmp_path / "saved")
    close(restored, kept)
    nnx.update(state[0], nnx.state(restored[0]))
    close(state[0], kept[0])


def test_a_variable_in_two_places_is_refused() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    pair = nnx.Sequential(model, nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
    pair.layers[1].kernel = model.kernel
    with pytest.raises(CaptureError, match=r"^'model/.*kernel' and 'model/.*kernel' are one Var"):
        jf.capture(loss_of, example=(pair, batches()[0]))


def test_another_mode_of_a_model_is_named() -> None:
    state = objects(TX)
    step = jf.distribute(train_step, (*state, batches()[0]), "single")
    state[0].eval()
    said = (
        "'model/1' was a Dropout of 2 with deterministic=False and is one with deterministic=True"
    )
    with pytest.raises(FeedError, match=said) as caught:
        step(*state, batches()[0])
    assert "call model.train() of an nnx model before the step" in str(caught.value.hint)
    with pytest.raises(FeedError, match=said) as caught:
        step.evaluate(train_step, *state, batches()[0])
    assert "calls model.eval() of an nnx model itself" in str(caught.value.hint)

    def changes_mode(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
        model.eval()
        return train_step(model, optimizer, metrics, batch)

    with pytest.raises(CaptureError, match=said) as refused:
        jf.capture(changes_mode, example=(*objects(TX), batches()[0]))
    assert "outside of the step" in str(refused.value.hint)


def test_a_generator_is_a_leaf_that_has_no_objects() -> None:
    batches = (jnp.ones((4, 2)) for _ in range(3))
    check_shared(("state", "batch"), (jnp.ones(2), batches))  # jax would warn of it
    assert not has_objects((batches,))


def drawing(state: Any, batch: Any, rngs: Any) -> Any:
    kept = jax.random.bernoulli(rngs(), 0.5, batch["x"].shape)
    grads = jax.grad(lambda w: jnp.square(batch["x"] * kept @ w - batch["y"]).mean())(state)
    updates, _ = TX.update(grads, TX.init(state), state)
    return state + updates, {}


@pytest.mark.parametrize("inside", [False, True])
def test_explain_names_a_generator_that_is_passed_at_a_call(inside: bool) -> None:
    def step(state: Any, batch: Any, given: Any) -> Any:
        return drawing(state, batch, given["rngs"] if inside else given)

    batch, rngs = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 2))}, nnx.Rngs(0)
    given = {"rngs": rngs} if inside else rngs
    example = (jnp.ones((4, 2)), batch, given)
    made = jf.distribute(step, example=example, strategy="single")
    assert "state: state, given (a generator); batch: batch\n" in made.explain()
    made(*example)
    assert rngs.default.count[...] == 1


def test_a_generator_in_the_batch_is_named() -> None:
    def step(state: Any, batch: Any) -> Any:
        return drawing(state, batch, batch["rngs"])

    batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 2)), "rngs": nnx.Rngs(0)}
    with pytest.raises(CaptureError, match="'batch/rngs' is a generator of random numbers") as got:
        jf.distribute(step, example=(jnp.ones((4, 2)), batch), strategy="single")
    assert "step(state, batch, rngs)" in got.value.__notes__[-1]
