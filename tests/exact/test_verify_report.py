"""The report of `jf.verify`: its measurements, and the share of rounding noise in a difference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.runtime.verification import Verification

TX = jf.distributed_optimizer(optax.adam(1e-2))
DRAWN = np.random.default_rng(0)
BATCHES = [DRAWN.normal(size=(16, 4)).astype(np.float32) for _ in range(4)]


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> jax.Array:
        h = batch @ params["w"] + params["bias"]
        h = (h - h.mean(0)) / (h.std(0) + 1e-3)  # removes the bias again: its gradient is 0
        return jnp.mean(jnp.square(h @ params["out"] - 1))

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


@pytest.fixture(scope="module")
def found() -> Verification:
    w, out = DRAWN.normal(size=(4, 8)), DRAWN.normal(size=(8, 1))
    params = {"w": jnp.float32(w), "bias": jnp.zeros(8), "out": jnp.float32(out)}
    return jf.verify(train_step, {"params": params, "opt": TX.init(params)}, BATCHES)


@pytest.mark.grid
def test_a_leaf_that_rounding_decides_is_explained(found: Verification) -> None:
    noisy = {"params/bias", "opt/0/mu/bias", "opt/0/nu/bias"}
    assert found.largest > 0.01
    assert {name for name in found.differences if found.is_noise(name)} == noisy
    assert max(x for name, x in found.differences.items() if name not in noisy) < 1e-6
    assert found.agrees
    (line,) = [x for x in str(found).splitlines() if x.startswith("  params/bias: ")]
    assert ": rounding noise, since one device ends " in line


def test_the_report_states_its_measure_and_leaves_noise_out_of_the_first_line(
    found: Verification,
) -> None:
    first, measure, *_ = str(found).splitlines()
    assert first.endswith("; 3 more decided by rounding noise")
    assert float(first.partition("at most ")[2].partition(";")[0]) < 1e-6
    assert measure == (
        "  measure: of each leaf of the state, the largest difference over its largest value; "
        "tolerance 1e-04"
    )


def test_a_difference_that_rounding_does_not_make_is_not_explained_away() -> None:
    wrong = Verification(3, {"w": 0.5, "b": 1e-7}, True, noise={"w": 1e-6})
    assert not wrong.agrees
    assert str(wrong).splitlines()[2] == (
        "  w: 5.0e-01: BEYOND the tolerance and not rounding noise, since one device ends "
        "1.0e-06 from itself if it starts 1e-6 away"
    )
    assert repr(wrong) == "Verification(3 steps, the same state on all, largest=5.0e-01)"


def test_a_value_that_is_finite_on_one_side_alone_is_never_noise() -> None:
    wrong = Verification(3, {"w": float("inf")}, True, noise={"w": float("inf")})
    assert not wrong.agrees


def test_trainers_that_differ_do_not_agree() -> None:
    assert not Verification(3, {"w": 0.0}, same_on_all=False).agrees
