"""The scalars that a step returned last can be read by name, without waiting for the step."""

import gc
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.capture import capture
from jaxfleet.capture.signature import leaf_names
from jaxfleet.cluster import ProcessGroup
from jaxfleet.cluster.rank_metrics import RankCounts
from jaxfleet.runtime.rank_step import RankStep
from jaxfleet.runtime.scalar_metrics import MOST_METRICS, MOST_NAME, ScalarMetrics, Scalars
from jaxfleet.runtime.trainer_step import TrainerStep
from tests.runtime.toys import rows, start, training

TX = jf.distributed_optimizer(optax.sgd(0.1))


class Computing:
    """An array without axes whose value comes later, and which must not be waited for."""

    ndim, dtype = 0, np.dtype(np.float32)

    def __init__(self, value: float) -> None:
        self.value, self.done = value, False

    def is_ready(self) -> bool:
        return self.done

    def is_deleted(self) -> bool:
        return False

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        assert self.done
        return np.asarray(self.value, dtype)

    is_fully_addressable = True


def latest(metrics: Any) -> dict[str, float]:
    scalars = ScalarMetrics()
    scalars.note(
        jax.tree_util.tree_leaves(metrics), tuple(leaf_names(metrics, "metrics", bare=False))
    )
    return scalars.latest().values


def test_names_are_paths() -> None:
    metrics = {"loss": jnp.float32(2.0), "eval": {"top": [jnp.int32(3), jnp.bool_(True)]}}
    assert latest(metrics) == {"loss": 2.0, "eval/top/0": 3.0, "eval/top/1": 1.0}


def test_a_metric_without_a_container_has_a_name() -> None:
    assert latest(jnp.float32(2.0)) == {"metric": 2.0}


def test_numbers_of_python_and_numpy_are_scalars() -> None:
    metrics = {"a": 1, "b": 2.5, "c": True, "d": np.float64(0.5), "e": np.array(7)}
    assert latest(metrics) == {"a": 1.0, "b": 2.5, "c": 1.0, "d": 0.5, "e": 7.0}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, jnp.uint8])
def test_narrow_types_are_scalars(dtype: Any) -> None:
    assert latest({"x": jnp.asarray(2, dtype)}) == {"x": 2.0}


def test_all_else_is_left_out() -> None:
    metrics = {
        "rows": jnp.zeros(3),
        "one": jnp.zeros(1),
        "key": jax.random.key(0),
        "complex": jnp.complex64(1j),
        "huge": 10**400,
    }
    assert latest(metrics) == {}


def test_hostile_names_become_short_printable_and_unique() -> None:
    metrics = {
        "<script>": 1,
        "a/b": 2,
        "a": {"b": 3},
        "x\n\x1b[31m": 4,
        "\ud800": 5,
        "n" * 999: 6,
        "": 7,
    }
    found = latest(metrics)
    assert sorted(found.values()) == [1, 2, 3, 4, 5, 6, 7]
    assert {"<script>", "a/b", "a/b~1", "x??[31m", "?", "metric"} <= found.keys()
    assert all(name.isprintable() and len(name) <= MOST_NAME for name in found)
    assert all(name.encode() for name in found)


def test_the_number_of_scalars_is_bounded() -> None:
    assert len(latest({f"m{n}": n for n in range(MOST_METRICS + 5)})) == MOST_METRICS


def test_values_that_are_not_finite_are_kept() -> None:
    found = latest({"a": jnp.float32(np.nan), "b": jnp.float32(np.inf)})
    assert np.isnan(found["a"])
    assert found["b"] == np.inf


def test_a_deleted_array_is_left_out() -> None:
    gone = jnp.float32(1.0) + 1
    gone.delete()
    assert latest({"gone": gone, "here": jnp.float32(2.0)}) == {"here": 2.0}


def test_a_metric_deleted_while_another_thread_asks_for_it_is_left_out() -> None:
    """Jaxlib 0.10 crashes if the user's own array is asked between the deletion and the answer."""
    made, scalars = jnp.float32(1.0) + 1, ScalarMetrics(is_shared=True)
    scalars.note([made], NAMES)
    newest = scalars._kept[0]  # noqa: SLF001
    assert newest is not None
    made.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        newest.leaves[0].is_ready()
    assert scalars.latest() == Scalars(1, {})


def test_the_metrics_of_a_rank_are_read_by_another_thread_and_do_not_keep_its_step() -> None:
    counts = RankCounts()
    joined = SimpleNamespace(counts=counts, wait_less=lambda **_: None, rank=0)
    captured = capture(training(TX), example=(start(TX), rows(8)))
    strategy = jf.DistributedStrategy(mode="collective")
    step: Any = RankStep(captured, strategy, cast("ProcessGroup", joined))
    made = jnp.float32(1.0) + 1
    step._scalars.note([made], NAMES)  # noqa: SLF001
    assert counts.scalars() == (1, {"x": 2.0})
    made = jnp.float32(2.0) + 1
    step._scalars.note([made], NAMES)  # noqa: SLF001
    made.delete()
    assert counts.scalars() == (2, {})
    kept = ref(step)
    del step
    gc.collect()
    assert kept() is None


def test_a_metric_that_is_deleted_between_two_questions_is_left_out() -> None:
    class Deleted(Computing):
        def is_ready(self) -> bool:
            raise RuntimeError("Array has been deleted")

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise RuntimeError("Array has been deleted")

    scalars = ScalarMetrics()
    scalars.note([Deleted(1.0)], NAMES)
    assert scalars.latest() == Scalars(1, {})


def noted(scalars: ScalarMetrics, value: float) -> Computing:
    made = Computing(value)
    scalars.note([made], NAMES)
    return made


NAMES = ("metrics/x",)


def test_the_newest_computed_step_is_read_and_none_is_waited_for() -> None:
    scalars = ScalarMetrics()
    assert scalars.latest() == Scalars(0, {})
    first, second = noted(scalars, 1.0), noted(scalars, 2.0)
    assert scalars.latest() == Scalars(0, {})
    first.done = True
    assert scalars.latest() == Scalars(1, {"x": 1.0})
    noted(scalars, 3.0)
    assert scalars.latest() == Scalars(1, {"x": 1.0})
    second.done = True
    assert scalars.latest().step in {1, 2}  # the second step need not be kept


def test_a_step_of_which_only_some_values_are_computed_is_not_read() -> None:
    scalars, early, late = ScalarMetrics(), Computing(1.0), Computing(2.0)
    scalars.note([early, late], ("metrics/early", "metrics/late"))
    late.done = True
    for _ in range(3):
        noted(scalars, 3.0)
    assert scalars.latest() == Scalars(0, {})


def test_steps_that_are_always_in_flight_are_read_some_time() -> None:
    scalars, made, read = ScalarMetrics(), list[Computing](), []
    for step in range(1, 41):
        made.append(noted(scalars, float(step)))
        if step > 10:  # ten are in flight
            made[step - 11].done = True
        read.append(scalars.latest().step)
    assert read == sorted(read)
    assert read[-1] >= 20


def test_steps_are_counted_from_that_of_the_job() -> None:
    scalars = ScalarMetrics()
    scalars.note([1.0], NAMES, at_least=100)
    scalars.note([1.0], NAMES, at_least=50)  # servers went back
    assert scalars.step == 101


def test_metrics_of_another_structure_get_names_of_their_own() -> None:
    scalars = ScalarMetrics()
    scalars.note([1.0], NAMES)
    scalars.note([np.zeros(2), 3.0], ("metrics/rows", "metrics/y"))
    assert scalars.latest() == Scalars(2, {"y": 3.0})


def trained(step: Any, batches: Sequence[Mapping[str, Any]]) -> tuple[Any, list[float]]:
    state, losses = start(TX), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


BATCHES = [rows(8, seed) for seed in range(3)]


@pytest.mark.parametrize("mode", ["single", "collective"])
def test_a_step_of_devices_keeps_its_scalars(mode: Any) -> None:
    step: Any = jf.distribute(training(TX), (start(TX), BATCHES[0]), mode)
    _, losses = trained(step, BATCHES)
    assert step._scalars.latest() == Scalars(3, {"loss": losses[-1]})  # noqa: SLF001


def test_a_trainer_keeps_its_scalars() -> None:
    found = []

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        state, losses = trained(step, BATCHES)
        found.append((step._scalars.latest(), losses))  # noqa: SLF001
        return step.pull(state), ()

    jf.Twin(training(TX), (start(TX), BATCHES[0]), "pserver").play(script)
    assert len(found) == 2
    assert all(scalars == Scalars(3, {"loss": losses[-1]}) for scalars, losses in found)
