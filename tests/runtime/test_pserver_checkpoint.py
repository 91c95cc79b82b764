"""Checkpoints of a job: written by and restored on any number of servers and trainers."""

import gc
import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.errors import CheckpointError, FeedError
from jaxfleet.runtime import TrainerStep
from jaxfleet.strategy import DistributedStrategy
from tests.tiers import by_default

CUT = DistributedStrategy(min_block_size=16)
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
}
BATCHES = [
    {
        "x": np.random.default_rng(n).normal(size=(16, 32)).astype(np.float32),
        "y": np.random.default_rng(n + 99).normal(size=16).astype(np.float32),
    }
    for n in range(5)
]


def training(name: str) -> tuple[Any, Any]:
    """Returns a step and its initial state."""
    tx = jf.distributed_optimizer(OPTIMIZERS[name])

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> jax.Array:
            hidden = jax.nn.relu(batch["x"] @ params["w"] + params["b"])
            return ((hidden.sum(-1) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt": opt, "seen": state["seen"] + 1}, loss

    rng = np.random.default_rng(0)
    params = {
        "w": jax.numpy.asarray(rng.normal(size=(32, 16)) * 0.1, np.float32),
        "b": jax.numpy.zeros(16),
    }
    return train_step, {"params": params, "opt": tx.init(params), "seen": jax.numpy.int32(0)}


def twin(name: str, *, servers: int = 2, trainers: int = 2) -> jf.Twin:
    step, state = training(name)
    return jf.Twin(step, (state, BATCHES[0]), CUT, servers=servers, trainers=trainers)


def go_on(step: Any, state: Any, batches: list[Any]) -> Any:
    for batch in batches:
        state, _ = step(state, batch)
    return state


def saved(name: str, folder: Path, **of_job: int) -> Any:
    """Trains three steps, saves, trains two more; returns the final state."""
    _, start = training(name)

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        state = go_on(step, start, BATCHES[:3])
        step.save(folder, state)
        return step.pull(go_on(step, state, BATCHES[3:])), ()

    return twin(name, **of_job).play(script).states[0]


def restored(name: str, folder: Path, **of_job: int) -> Any:
    """Resumes from a checkpoint; returns the final state."""

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        return step.pull(go_on(step, step.restore(folder), BATCHES[3:])), ()

    return twin(name, **of_job).play(script).states[0]


def assert_close(found: Any, expected: Any) -> None:
    """Asserts equality up to the order of float32 sums over the batch."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), found, expected
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_job_goes_on_bitwise(name: str, tmp_path: Path) -> None:
    expected = saved(name, tmp_path / "c")
    jax.tree.map(np.testing.assert_array_equal, restored(name, tmp_path / "c"), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("servers", by_default([1, 3], 3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_number_of_servers_goes_on_bitwise(name: str, servers: int, tmp_path: Path) -> None:
    expected = saved(name, tmp_path / "c")
    found = restored(name, tmp_path / "c", servers=servers)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.grid
def test_another_number_of_trainers_goes_on(tmp_path: Path) -> None:
    expected = saved("adam", tmp_path / "c")
    assert_close(restored("adam", tmp_path / "c", trainers=4), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_device_goes_on_from_a_job(name: str, tmp_path: Path) -> None:
    expected = saved(name, tmp_path / "c")
    step, state = training(name)
    alone = jf.distribute(step, (state, BATCHES[0]), "single")
    assert isinstance(alone, jf.Step)
    assert_close(go_on(alone, alone.restore(tmp_path / "c"), BATCHES[3:]), expected)


def test_a_job_goes_on_from_one_device(tmp_path: Path) -> None:
    step, start = training("adam")
    alone = jf.distribute(step, (start, BATCHES[0]), "single")
    assert isinstance(alone, jf.Step)
    state = go_on(alone, start, BATCHES[:3])
    alone.save(tmp_path / "c", state, number=3)
    assert open_checkpoint(tmp_path / "c").step == 3
    assert_close(restored("adam", tmp_path / "c"), go_on(alone, state, BATCHES[3:]))


def test_what_only_trainers_have_is_saved_too(tmp_path: Path) -> None:
    ended = saved("adam", tmp_path / "c")
    assert int(ended["seen"]) == 5
    assert int(open_checkpoint(tmp_path / "c").read("seen")) == 3


def test_a_checkpoint_of_another_step_is_refused(tmp_path: Path) -> None:
    saved("adam", tmp_path / "c")
    with pytest.raises(CheckpointError, match="has no 'opt/1/0/trace/b'"):
        restored("clipped", tmp_path / "c")


def test_no_checkpoint_is_an_error_on_every_trainer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        restored("adam", tmp_path / "nothing")


def test_an_old_state_is_not_pulled() -> None:
    _, start = training("adam")

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        old, _ = step(start, BATCHES[0])
        step(old, BATCHES[1])
        return step.pull(old), ()

    with pytest.raises(FeedError, match="servers hold only the newest"):
        twin("adam").play(script)


def test_a_handle_says_how_to_read_it() -> None:
    _, start = training("adam")

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        state, _ = step(start, BATCHES[0])
        handle = state["opt"][0].mu["w"]
        assert handle.shape == (32, 16)
        assert "2 servers" in repr(handle)
        with pytest.raises(FeedError, match="cannot be read here") as caught:
            np.asarray(handle)
        assert "step.pull(state)" in "".join(caught.value.__notes__)
        return None, ()

    twin("adam").play(script)


def test_arrays_travel_with_at_most_one_copy_a_side() -> None:
    _, start = training("adam")

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        go_on(step, start, BATCHES)
        return None, (step.stats(),)

    for (stats,) in twin("adam").play(script).metrics:
        here = stats["trainer"]
        assert here["sent"] > 0
        assert here["sent_copies"] == 0  # the network reads the device's own memory
        # A step receives both slices of `w`, which are joined, the loss, and `b`, read in place.
        assert here["received"] == 4 * len(BATCHES)
        assert here["received_copies"] == 3 * len(BATCHES)
        for server in stats["servers"]:
            assert server["received"] > server["copies_in"]  # gradients are read in place


def test_what_was_decided_can_be_read() -> None:
    _, start = training("clipped")

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        go_on(step, start, BATCHES[:1])
        return None, (step.explain(),)

    (text,) = twin("clipped").play(script).metrics[0]
    assert "2 trainers, 8 of 16 rows on each; 2 servers" in text
    assert "whole: w and b" in text or "whole: params/b and params/w" in text
    assert "reduces its rows" in text


def test_verify_compares_with_one_device() -> None:
    step, start = training("adam")
    found = jf.verify(step, start, BATCHES, CUT, servers=3, trainers=2)
    assert found.steps == 5
    assert found.same_on_all
    assert 0 < found.largest < 1e-5
    assert "off from one device by at most" in str(found)


def test_a_leaf_that_is_called_as_a_slice_would_be_is_saved_as_itself(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.adam(1e-2))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> jax.Array:
            return ((batch["x"] @ params["w"] + params["w.block0"]).sum(-1) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = {"w": jax.numpy.ones((32, 16)), "w.block0": jax.numpy.ones((16,))}
    start = {"params": params, "opt": tx.init(params)}

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        state = go_on(step, start, BATCHES[:1])
        step.save(tmp_path / "c", state)
        return step.pull(state), ()

    whole = DistributedStrategy(slice_var=False)
    ended = jf.Twin(train_step, (start, BATCHES[0]), whole).play(script).states[0]
    found = open_checkpoint(tmp_path / "c").read("params/w.block0")
    np.testing.assert_array_equal(found, ended["params"]["w.block0"])


@pytest.mark.grid
def test_verify_does_not_take_the_memory_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    # XLA's use of donated memory differs from run to run, so the donation is checked.
    taken: list[bool] = []

    class Noting(jf.Step):
        def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
            taken.append(self.strategy.donate)
            return super().__call__(state, batch)

    verification = importlib.import_module("jaxfleet.runtime.verification")
    monkeypatch.setattr(verification, "Step", Noting)
    step, start = training("adam")
    jf.verify(step, start, BATCHES[:1], CUT)
    assert taken == [False]


@pytest.mark.grid
def test_a_new_run_does_not_go_on_from_the_servers_of_an_old_one(tmp_path: Path) -> None:
    _, start = training("adam")

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        return go_on(step, start, BATCHES[:2]), ()

    twin("adam").play(script, checkpoint_dir=tmp_path)
    with pytest.raises(FeedError, match="the servers go on from their checkpoints") as caught:
        twin("adam").play(script, checkpoint_dir=tmp_path)
    assert "step.restore(path)" in "".join(caught.value.__notes__)


def arrays_in_cycles() -> list[str]:
    """Collects garbage; returns the arrays of a slice's size or more that only cycles kept.

    Anything in this process may leave other cycles (a compile, another thread), so the number of
    objects that `gc.collect` returns does not measure a step's.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [*gc.garbage, *gc.get_referents(*gc.garbage)]
        arrays = [x for x in found if isinstance(x, np.ndarray | jax.Array | memoryview)]
        return [f"{type(x).__name__} of {x.nbytes} bytes" for x in arrays if x.nbytes >= 1024]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.grid
def test_a_step_lets_go_of_its_arrays_without_the_garbage_collector() -> None:
    _, start = training("adam")

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        state = go_on(step, start, BATCHES)
        gc.collect()
        gc.disable()  # collection could run at any time, but lent memory must be returned before
        try:
            go_on(step, state, BATCHES[:1])
            return None, (arrays_in_cycles(),)
        finally:
            gc.enable()

    found = twin("adam", trainers=1).play(script).metrics
    assert [arrays for (arrays,) in found] == [[]]
