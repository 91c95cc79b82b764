"""Steps that accumulate over slices of the batch, and steps that cannot be divided."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxfleet as jf
from jaxfleet.env import PserverRole
from jaxfleet.runtime.pserver_entry import job_step
from tests.tiers import grid

DEVICES = 4
ROWS = 32
TX = jf.distributed_optimizer(optax.sgd(0.1))
DRAWN = np.random.default_rng(0)
BATCH = {
    "x": DRAWN.normal(size=(ROWS, 4)).astype(np.float32),
    "y": DRAWN.normal(size=(ROWS, 2)).astype(np.float32),
}
STATE = jnp.ones((4, 2))


def mean_loss(w: Any, batch: Any) -> Any:
    return jnp.square(jnp.tanh(batch["x"] @ w) - batch["y"]).mean()


def normalized_loss(w: Any, batch: Any) -> Any:
    h = batch["x"] @ w
    return jnp.square((h - h.mean(0)) / (h.std(0) + 1e-3) - batch["y"]).mean()


def positional_loss(w: Any, batch: Any) -> Any:
    h = jnp.square(batch["x"] @ w - batch["y"]).mean(1)
    return (h * jnp.arange(h.shape[0])).mean()


def random_loss(w: Any, batch: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["y"].shape)
    return jnp.square(batch["x"] @ w * keep - batch["y"]).mean()


def updated(w: Any, grads: Any) -> Any:
    updates, _ = TX.update(grads, TX.init(w), w)
    return optax.apply_updates(w, updates)


def adding_up(slices: int, loss: Any = mean_loss) -> Any:
    """Returns a step that accumulates gradients over slices of the batch in a scan."""

    def step(w: Any, batch: Any) -> Any:
        def turn(carry: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(w, part)
            return (carry[0] + value, carry[1] + grads), None

        parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
        (value, grads), _ = lax.scan(turn, (0.0, jnp.zeros_like(w)), parts)
        return updated(w, grads / slices), {"loss": value / slices}

    return step


def reductions(step: Any) -> int:
    ops = [op for block in step.program.blocks for op in block.ops]
    return sum(op.type == "c_allreduce_sum" and bool(op.role_var) for op in ops)


def distributed(step: Any, batch: Any = None) -> Any:
    strategy = jf.DistributedStrategy(devices=DEVICES, donate=False)
    return jf.distribute(step, (STATE, BATCH if batch is None else batch), strategy)


def assert_as_one_device(step: Any, made: Any, batch: Any) -> None:
    found, expected = made(STATE, batch), step(STATE, batch)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1]["loss"], expected[1]["loss"], rtol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("slices", [2, 4, 8])
def test_a_loop_that_adds_up_over_slices_of_the_batch_is_divided(slices: int) -> None:
    step = adding_up(slices)
    made = distributed(step)
    assert reductions(made) == 1
    assert_as_one_device(step, made, BATCH)


@pytest.mark.grid
def test_a_loop_over_slices_is_divided_for_a_batch_that_can_be_and_right_for_others() -> None:
    def step(w: Any, batch: Any) -> Any:  # the letter stays: no size is -1
        def turn(carry: Any, part: Any) -> Any:
            return carry + jax.grad(mean_loss)(w, part), None

        shapes = {name: (2, x.shape[0] // 2, x.shape[1]) for name, x in batch.items()}
        parts = {name: x.reshape(shapes[name]) for name, x in batch.items()}
        grads, _ = lax.scan(turn, jnp.zeros_like(w), parts)
        return updated(w, grads), {"loss": jnp.float32(0)}

    made = distributed(step)
    assert made.captured.rows is None
    assert "interleave_slices" in made.explain()
    for rows in (32, 16, 4):
        assert_as_one_device(step, made, {name: x[:rows] for name, x in BATCH.items()})


def counting(slices: int, loop: str, loss: Any = mean_loss) -> Any:
    """Returns a step that slices the batch by a loop counter."""
    rows = ROWS // slices

    def step(w: Any, batch: Any) -> Any:
        def turn(number: Any, sums: Any) -> Any:
            part = {
                name: lax.dynamic_slice_in_dim(x, number * rows, rows) for name, x in batch.items()
            }
            value, grads = jax.value_and_grad(loss)(w, part)
            return sums[0] + value, sums[1] + grads

        sums = (0.0, jnp.zeros_like(w))
        if loop == "fori_loop":
            sums = lax.fori_loop(0, slices, turn, sums)
        else:
            sums, _ = lax.scan(lambda c, n: (turn(n, c), None), sums, jnp.arange(slices))
        return updated(w, sums[1] / slices), {"loss": sums[0] / slices}

    return step


@pytest.mark.parametrize("loop", ["fori_loop", "scan"])
@pytest.mark.parametrize("slices", [2, grid(4)])
def test_a_loop_that_cuts_out_slices_by_its_count_is_divided(slices: int, loop: str) -> None:
    step = counting(slices, loop)
    made = distributed(step)
    assert reductions(made) == 1
    assert_as_one_device(step, made, BATCH)


def skipping(w: Any, batch: Any) -> Any:
    """Cuts overlapping windows."""

    def turn(number: Any, grads: Any) -> Any:
        part = {name: lax.dynamic_slice_in_dim(x, number * 4, 8) for name, x in batch.items()}
        return grads + jax.grad(mean_loss)(w, part)

    return updated(w, lax.fori_loop(0, 4, turn, jnp.zeros_like(w))), {"loss": jnp.float32(0)}


def weighting(w: Any, batch: Any) -> Any:
    """Gives later slices more weight."""

    def turn(number: Any, grads: Any) -> Any:
        part = {name: lax.dynamic_slice_in_dim(x, number * 8, 8) for name, x in batch.items()}
        return grads + number * jax.grad(mean_loss)(w, part)

    return updated(w, lax.fori_loop(0, 4, turn, jnp.zeros_like(w))), {"loss": jnp.float32(0)}


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [skipping, weighting, counting(2, "scan", normalized_loss)])
def test_a_loop_whose_slices_or_count_mean_more_runs_whole_and_warns(step: Any) -> None:
    with pytest.warns(UserWarning, match="is not divided: each of 4 devices does all"):
        made = distributed(step)
    assert_as_one_device(step, made, BATCH)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:random numbers are drawn:UserWarning")  # a constant key
@pytest.mark.parametrize("loss", [normalized_loss, positional_loss, random_loss])
def test_a_loop_in_which_a_rows_place_matters_runs_whole_and_warns(loss: Any) -> None:
    step = adding_up(2, loss)
    with pytest.warns(
        UserWarning, match="'step' is not divided: each of 4 devices does all"
    ) as got:
        made = distributed(step)
    (said,) = [text for one in got if "not divided" in (text := str(one.message))]
    assert "test_undivided.py" in said
    assert "DistributedStrategy(merge=N)" in said
    assert_as_one_device(step, made, BATCH)


Slice = dict[str, Any]


def slices_of(batch: Any, count: int = 2) -> list[Slice]:
    rows = batch["x"].shape[0] // count
    return [
        {name: x[at * rows : (at + 1) * rows] for name, x in batch.items()} for at in range(count)
    ]


def python_slices(w: Any, batch: Any) -> Any:
    total = jnp.zeros_like(w)
    for part in slices_of(batch):
        total += jax.grad(mean_loss)(w, part)
    return updated(w, total), {"loss": jnp.float32(0)}


def means_of_lists(w: Any, batch: Any) -> Any:
    found = [jax.value_and_grad(mean_loss)(w, part) for part in slices_of(batch, 4)]
    grads = sum(grads for _, grads in found) / 4
    return updated(w, grads), {"loss": sum(loss for loss, _ in found) / 4}


def loops_in_slices(w: Any, batch: Any) -> Any:
    def loss(w: Any, part: Slice) -> Any:
        def turn(h: Any, _: Any) -> Any:
            return jnp.tanh(h @ w @ w.T), None

        h, _ = lax.scan(turn, part["x"], None, length=2)
        return jnp.square(h @ w - part["y"]).mean()

    grads = sum(jax.grad(loss)(w, part) for part in slices_of(batch))
    return updated(w, grads), {"loss": jnp.float32(0)}


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [python_slices, means_of_lists, grid(loops_in_slices)])
def test_sums_over_slices_that_python_cut_are_divided(step: Any) -> None:
    made = distributed(step)
    assert reductions(made) == 1
    assert "stride_slices" in made.explain()
    for rows in (32, 16):
        assert_as_one_device(step, made, {name: x[:rows] for name, x in BATCH.items()})


@pytest.mark.grid
def test_slices_that_devices_cannot_share_run_whole_and_right() -> None:
    made = distributed(means_of_lists)
    small = {name: x[:8] for name, x in BATCH.items()}  # 4 slices of 2 rows, on 4 devices
    assert_as_one_device(means_of_lists, made, small)


def weighted_slices(w: Any, batch: Any) -> Any:
    first, second = (jax.grad(mean_loss)(w, part) for part in slices_of(batch))
    return updated(w, first + 2 * second), {"loss": jnp.float32(0)}


def last_slices_loss(w: Any, batch: Any) -> Any:
    found = [jax.value_and_grad(mean_loss)(w, part) for part in slices_of(batch)]
    return updated(w, sum(grads for _, grads in found)), {"loss": found[-1][0]}


def largest_loss(w: Any, batch: Any) -> Any:
    found = [jax.value_and_grad(mean_loss)(w, part) for part in slices_of(batch)]
    losses = jnp.stack([loss for loss, _ in found])
    return updated(w, sum(grads for _, grads in found)), {"loss": losses.max()}


def first_slice_twice(w: Any, batch: Any) -> Any:
    first, second = (jax.grad(mean_loss)(w, part) for part in slices_of(batch))
    return updated(w, first + second + first), {"loss": jnp.float32(0)}


def slices_in_pairs(w: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        first, second = slices_of(batch)
        return jnp.square(first["x"] @ w - second["y"]).mean()

    return updated(w, jax.grad(loss)(w)), {"loss": jnp.float32(0)}


def slices_beside_strides(w: Any, batch: Any) -> Any:
    strided = batch["y"].reshape(ROWS // 2, 2, 2)[:, 0]
    total = sum(jax.grad(mean_loss)(w, {"x": part["x"], "y": strided}) for part in slices_of(batch))
    return updated(w, total), {"loss": jnp.float32(0)}


def loop_beside_strides(w: Any, batch: Any) -> Any:
    strided = batch["y"].reshape(ROWS // 2, 2, 2)[:, 0]

    def turn(grads: Any, x: Any) -> Any:
        return grads + jax.grad(mean_loss)(w, {"x": x, "y": strided}), None

    grads, _ = lax.scan(turn, jnp.zeros_like(w), batch["x"].reshape(2, ROWS // 2, 4))
    return updated(w, grads), {"loss": jnp.float32(0)}


def one_after_another(w: Any, batch: Any) -> Any:
    first, second = slices_of(batch)
    middle = w - 0.1 * jax.grad(mean_loss)(w, first)
    return updated(w, jax.grad(mean_loss)(middle, second)), {"loss": jnp.float32(0)}


def normalized_slices(w: Any, batch: Any) -> Any:
    total = sum(jax.grad(normalized_loss)(w, part) for part in slices_of(batch))
    return updated(w, total), {"loss": jnp.float32(0)}


def random_slices(w: Any, batch: Any) -> Any:
    total = sum(jax.grad(random_loss)(w, part) for part in slices_of(batch))
    return updated(w, total), {"loss": jnp.float32(0)}


def positional_slices(w: Any, batch: Any) -> Any:
    total = sum(jax.grad(positional_loss)(w, part) for part in slices_of(batch))
    return updated(w, total), {"loss": jnp.float32(0)}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "step",
    [
        weighted_slices,
        slices_beside_strides,
        loop_beside_strides,
        first_slice_twice,
        normalized_slices,
        grid(last_slices_loss),
        grid(largest_loss),
        grid(slices_in_pairs),
        grid(one_after_another),
        grid(random_slices),
        grid(positional_slices),
    ],
)
def test_slices_that_are_more_than_summands_stay_as_they_are(step: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about undivided steps
        made = distributed(step)
    assert "strided" not in str(made.program)
    assert_as_one_device(step, made, BATCH)


def over_time(w: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        start = jnp.zeros((batch["x"].shape[1], 2))
        return lax.scan(lambda h, x: (jnp.tanh(x @ w + h), None), start, batch["x"])[0].mean()

    return updated(w, jax.grad(loss)(w)), {"loss": jnp.float32(0)}


def drawing(w: Any, batch: Any) -> Any:
    x = jax.random.normal(jax.random.key(batch["seed"][0]), (64, 4))
    grads = jax.grad(mean_loss)(w, {"x": x, "y": x[:, :2]})
    return updated(w, grads), {"loss": jnp.float32(0)}


TIME_MAJOR = {"x": DRAWN.normal(size=(8, 16, 4)).astype(np.float32)}
SEEDS = {"seed": np.zeros(DEVICES, np.int32)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("step", "batch", "instead"),
    [
        (last_slices_loss, BATCH, "reshape it to \\[slices, rows, ...\\] and add up in a lax.scan"),
        (over_time, TIME_MAJOR, "pass the batch with its examples first and swap the axes"),
        (drawing, SEEDS, "test_undivided.py"),
    ],
    ids=["a slice of its own", "time-major", "its own batch"],
)
def test_a_step_of_which_nothing_is_divided_warns_once_with_what_to_write(
    step: Callable[[Any, Any], Any], batch: Any, instead: str
) -> None:
    with pytest.warns(UserWarning, match=instead) as got:
        made = distributed(step, batch)
    assert len(got) == 1
    assert reductions(made) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_one_device(step, made, batch)


@pytest.mark.filterwarnings("ignore:random numbers are drawn:UserWarning")  # a constant key
def test_a_step_that_never_reads_its_batch_is_told_to_take_it_as_the_batch() -> None:
    def step(w: Any, batch: Any) -> Any:
        x = jax.random.normal(jax.random.key(0), (64, 4))
        grads = jax.grad(mean_loss)(w, {"x": x, "y": x[:, :2]})
        return updated(w, grads), {"rows": batch["x"].sum()}

    with pytest.warns(UserWarning, match="the gradients are not of the batch. Pass what the step"):
        distributed(step)


@pytest.mark.grid
def test_reductions_over_the_axis_of_a_vmap_are_reductions_over_rows() -> None:
    def loss(w: Any, batch: Any) -> Any:
        def row(x: Any, y: Any) -> Any:
            h = jnp.tanh(x @ w)
            h = (h - lax.pmean(h, "rows")) / (1 + lax.pmax(jnp.abs(x).max(), "rows"))
            return jnp.square(h - y).mean()

        return jax.vmap(row, axis_name="rows")(batch["x"], batch["y"]).mean()

    def step(w: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, batch)
        return updated(w, grads), {"loss": value}

    made = distributed(step)
    assert "gathers" not in made.explain()
    assert_as_one_device(step, made, BATCH)


def as_trainer(step: Any, trainer: int) -> Any:
    endpoints = ("127.0.0.1:6174", "127.0.0.1:6175")
    cluster = PserverRole("trainer", 4, endpoints, trainer_id=trainer)
    captured = jf.capture(step, example=(STATE, BATCH))
    return job_step(captured, jf.DistributedStrategy(mode="pserver"), None, cluster)


def test_trainers_of_which_each_does_all_of_the_work_are_warned_of_by_the_first() -> None:
    step = adding_up(2, random_loss)
    said = "'step' is not divided: each of 4 trainers does all of the work, since "
    with pytest.warns(UserWarning, match=said) as got:
        as_trainer(step, 0)
    assert "test_undivided.py" in str(got[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_trainer(step, 1)


def test_trainers_that_divide_the_slices_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_trainer(adding_up(4, random_loss), 0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("step", "rows"),
    [
        (adding_up(2), 32),
        (counting(2, "scan"), 32),
        (python_slices, 16),
        (means_of_lists, 8),  # 4 slices of 2 rows, which 4 trainers cannot share
    ],
)
def test_trainers_share_each_slice_of_the_batch(step: Any, rows: int) -> None:
    twin = jf.Twin(step, (STATE, BATCH), servers=1, trainers=4)
    assert not twin.programs().is_whole
    assert all("c_allgather" not in op.type for op in twin.programs().trainer.root.ops)
    batches = [BATCH, {name: x[:rows] for name, x in BATCH.items()}]
    found, expected = twin.run(STATE, batches), STATE
    for batch in batches:
        expected, metrics = step(expected, batch)
    for state in found.states:
        np.testing.assert_allclose(state, expected, rtol=1e-5)
    np.testing.assert_allclose(found.metrics[0][-1]["loss"], metrics["loss"], rtol=1e-5)


@pytest.mark.grid
def test_trainers_with_rows_of_their_own_share_slices_of_all_of_them() -> None:
    strategy = jf.DistributedStrategy(mode="pserver", batch="local")
    own = {name: x[:8] for name, x in BATCH.items()}
    step = adding_up(2)
    twin = jf.Twin(step, (STATE, own), strategy, servers=1, trainers=4)
    found = twin.run(STATE, [own])
    whole = {name: np.tile(x, (4, 1)) for name, x in own.items()}
    np.testing.assert_allclose(found.states[0], step(STATE, whole)[0], rtol=1e-5)
