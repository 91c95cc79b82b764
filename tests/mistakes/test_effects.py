"""Mistakes of impure steps: they print, call back, store values, differ."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxfleet as jf
from jaxfleet.errors import CaptureError
from tests.mistakes.common import Batch, State, batch, loss, refused, training, wrapped


def test_a_debug_print() -> None:
    step, state = training(wrapped())

    def printing(state: State, batch: Batch) -> Any:
        jax.debug.print("loss {}", loss(state["params"], batch))
        return step(state, batch)

    with refused(
        CaptureError,
        cause="the training step has a side effect: debug",
        line="jax.debug.print(",
        hint="return what you want to see as a metric",
    ):
        jf.capture(printing, example=(state, batch()))


def test_an_io_callback() -> None:
    step, state = training(wrapped())

    def logging(state: State, batch: Batch) -> Any:
        io_callback(print, None, loss(state["params"], batch))
        return step(state, batch)

    with refused(
        CaptureError,
        cause="the training step has a side effect: io_callback",
        line="io_callback(print",
        hint="take the call out of the step",
    ):
        jf.capture(logging, example=(state, batch()))


def test_a_callback_into_python() -> None:
    step, state = training(wrapped())

    def calling(state: State, batch: Batch) -> Any:
        x = jax.pure_callback(np.sort, jax.typeof(batch["x"]), batch["x"])
        return step(state, {**batch, "x": x})

    with refused(
        CaptureError,
        cause="the training step calls back into Python: pure_callback",
        line="jax.pure_callback(",
        hint="pass it in the batch",
    ):
        jf.capture(calling, example=(state, batch()))


def test_a_value_that_is_kept_from_one_trace_to_the_next() -> None:
    step, state = training(wrapped())
    kept: list[Any] = []

    def keeping(state: State, batch: Batch) -> Any:
        state, metrics = step(state, batch)
        if kept:
            metrics["change"] = metrics["loss"] - kept[-1]
        kept.append(metrics["loss"])
        return state, metrics

    with refused(
        CaptureError,
        cause="uses a value that another trace left behind",
        line="- kept[-1]",
        hint="in the state",
    ):
        jf.capture(keeping, example=(state, batch()))


def test_random_numbers_of_numpy() -> None:
    step, state = training(wrapped())
    random = np.random.default_rng(0)

    def noisy(state: State, batch: Batch) -> Any:
        noise = random.normal(size=4).astype(np.float32)
        return step(state, {**batch, "x": batch["x"] + noise})

    with refused(
        CaptureError,
        cause="in another way each time it is traced",
        line='batch["x"] + noise',
        hint="draw random numbers with jax.random",
    ):
        jf.capture(noisy, example=(state, batch()))


def test_sums_over_devices_by_hand() -> None:
    step, state = training(wrapped())

    def summing(state: State, batch: Batch) -> Any:
        state, metrics = step(state, batch)
        return state, jax.lax.pmean(metrics, axis_name="data")

    with refused(
        CaptureError,
        cause="the step reduces over devices by hand",
        line="jax.lax.pmean(",
        hint="distribute completes sums by itself",
    ):
        jf.capture(summing, example=(state, batch()))


def test_a_placement_on_devices_by_hand() -> None:
    step, state = training(wrapped())
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.P("data"))

    def placing(state: State, batch: Batch) -> Any:
        x = jax.lax.with_sharding_constraint(batch["x"], place)
        return step(state, {**batch, "x": x})

    with refused(
        CaptureError,
        cause="the training step places a value on devices by hand: sharding_constraint",
        line="with_sharding_constraint(",
        hint="distribute places values by itself",
    ):
        jf.capture(placing, example=(state, batch()))


def test_the_users_own_error_comes_out_as_it_is() -> None:
    def failing(state: State, batch: Batch) -> Any:
        return state["dropout"], {}

    with pytest.raises(KeyError, match="dropout"):
        jf.capture(failing, example=(training(wrapped())[1], batch()))


@pytest.mark.parametrize("convert", [float, np.asarray, bool])
def test_a_traced_value_taken_for_a_number_is_jaxs_own_error_and_names_the_step(
    convert: Any,
) -> None:
    step, state = training(wrapped())

    def reading(state: State, batch: Batch) -> Any:
        state, metrics = step(state, batch)
        return state, {"loss": jnp.float32(convert(metrics["loss"]))}

    with pytest.raises(TypeError, match=r"tracing the function reading at .*test_effects"):
        jf.capture(reading, example=(state, batch()))
