"""Mistakes with jobs of servers and trainers that show in one process."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, FeedError, ProgramError, StrategyError
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.runtime.verification import _difference
from tests.mistakes.common import batch, refused, training, wrapped

Result = tuple[Any, tuple[Any, ...]]


@pytest.mark.parametrize(("servers", "trainers"), [(0, 2), (2, 0)])
def test_a_job_of_nobody(servers: int, trainers: int) -> None:
    step, state = training(wrapped())
    with refused(
        StrategyError,
        cause=f"a job of {servers} servers and {trainers} trainers does not train",
        line="jf.verify(step, state, [batch()]",
        hint="at least one of each",
    ):
        jf.verify(step, state, [batch()], servers=servers, trainers=trainers)


def test_a_twin_without_an_example() -> None:
    step, _ = training(wrapped())
    with refused(
        CaptureError,
        cause="a step that is not captured yet needs an example",
        line="jf.Twin(step)",
        hint="jf.Twin(train_step, (state, batch), ...)",
    ):
        jf.Twin(step)


def test_a_verification_without_batches() -> None:
    step, state = training(wrapped())
    with refused(
        FeedError,
        cause="there is no batch to verify on",
        line="jf.verify(step, state, [])",
        hint="a list of global batches",
    ):
        jf.verify(step, state, [])


def test_a_batch_that_trainers_cannot_share() -> None:
    step, state = training(wrapped())
    with refused(
        FeedError,
        cause="a batch of 7 rows cannot be divided among 2 trainers",
        line="jf.verify(step, state, [batch(), batch(7)])",
        hint="a multiple of 2, such as 6 or 8",
    ):
        jf.verify(step, state, [batch(), batch(7)])


@pytest.mark.parametrize("of_whom", ["global", "local"])
def test_batches_of_another_size_on_one_trainer(of_whom: Any) -> None:
    step, state = training(wrapped())
    strategy = jf.DistributedStrategy(batch=of_whom)
    twin = Twin(step, (state, batch()), strategy, servers=1, trainers=2)

    def script(step: TrainerStep) -> Result:
        new, _ = step(state, batch())
        step(new, batch(12 if step.client.me.trainer else 8))
        return new, ()

    sizes = {"global": (12, 8), "local": (24, 16)}[of_whom]
    with pytest.raises(ProgramError) as caught:
        twin.play(script)
    text = str(caught.value)
    assert "the batch of step 2 has" in text
    assert all(f" {size} " in text for size in sizes)
    assert any("batches of the same size" in note for note in caught.value.__notes__)


def test_own_rows_of_a_step_that_needs_all_of_them() -> None:
    tx = wrapped()

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
        def loss(params: Any) -> Any:
            def body(carry: Any, _: None) -> tuple[Any, None]:
                return carry + jnp.tanh(batch["x"] @ params["w"] + carry).mean(), None

            carry, _ = jax.lax.scan(body, 0.0, None, length=2)
            return ((batch["x"] @ params["w"] + carry - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt_state": opt_state}, value

    _, state = training(tx)
    assert jf.verify(step, state, [batch()], jf.DistributedStrategy(batch="global")).largest < 1e-6
    twin = jf.Twin(step, (state, batch()), jf.DistributedStrategy(batch="local"))
    with refused(
        StrategyError,
        cause="'step' sums over the batch inside a loop, so a trainer needs all rows",
        line="carry",
        hint="strategy.batch='global'",
    ):
        twin.programs()


def test_all_trainers_may_change_the_size_together() -> None:
    step, state = training(wrapped())
    found = jf.verify(step, state, [batch(), batch(12), batch()], servers=1)
    assert found.largest < 1e-6
    assert found.same_on_all


@pytest.mark.parametrize(
    ("found", "expected", "wanted"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.5, math.nan], [1.0, math.nan], 0.5),
        ([1.5, math.inf], [1.0, math.inf], 0.5),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
        ([1.0, -math.inf], [1.0, math.inf], math.inf),
    ],
)
def test_a_value_that_is_not_finite_hides_no_difference(
    found: list[float], expected: list[float], wanted: float
) -> None:
    assert _difference(np.asarray(found), np.asarray(expected)) == wanted
