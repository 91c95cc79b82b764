"""Operators are assigned to their part of the step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.ir import Program, Role
from tests.capture.common import gradients_of, params_of, with_role
from tests.shared_zoo import captured_zoo

BATCH = np.ones((4, 3), np.float32)
RANK = [Role.FORWARD, Role.BACKWARD, Role.LR_SCHED, Role.OPTIMIZE]


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.square(jnp.tanh(batch @ params["w"]) + params["b"]).mean()


def captured(tx: Any, *, metrics: bool = True) -> Program:
    tx = jf.distributed_optimizer(tx)
    params = {"b": jnp.zeros(2), "w": jnp.ones((3, 2))}

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt_state}, {"loss": value} if metrics else {}

    return jf.capture(step, example=({"params": params, "opt": tx.init(params)}, BATCH)).program


def roles_of(program: Program) -> list[Role]:
    return [op.role for op in program.root.ops]


def writes(program: Program, role: Role) -> list[str]:
    return [name for op in with_role(program, role) for name in op.writes]


def test_adam_with_a_schedule_has_all_four_parts_in_order() -> None:
    program = captured(optax.adam(optax.cosine_decay_schedule(0.1, 10)))
    roles = roles_of(program)
    assert set(roles) == set(RANK)
    assert roles == sorted(roles, key=RANK.index)


def test_forward_makes_the_metrics_and_backward_the_gradients() -> None:
    program = captured(optax.adam(0.1))
    assert writes(program, Role.FORWARD)[-1] == "metrics/loss"
    assert {"params/b@GRAD", "params/w@GRAD"} <= set(writes(program, Role.BACKWARD))


def test_the_schedule_and_the_counters_are_no_part_of_a_parameters_update() -> None:
    program = captured(optax.adam(optax.cosine_decay_schedule(0.1, 10)))
    schedule = with_role(program, Role.LR_SCHED)
    assert {"opt/0/count", "opt/1/count"} <= set(writes(program, Role.LR_SCHED))
    assert any(op.type == "jax.cos" for op in schedule)
    assert all(program.lookup(name).shape == () for op in schedule for name in op.writes)


def test_optimize_updates_parameters_and_their_moments() -> None:
    updated = set(writes(captured(optax.adam(0.1)), Role.OPTIMIZE))
    assert {"params/w", "opt/0/mu/w", "opt/0/nu/w"} <= updated


def test_clipping_by_the_optimizer_is_optimize_and_by_hand_is_not() -> None:
    inside = captured(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    assert "jax.sqrt" in [op.type for op in with_role(inside, Role.OPTIMIZE)]
    by_hand = captured_zoo("hand_clip").program
    assert "jax.sqrt" in [op.type for op in with_role(by_hand, Role.BACKWARD)]
    assert gradients_of(by_hand)[0] == ("params/fc0/b", "params/fc0/b@GRAD")


def test_an_average_of_the_parameters_is_optimize() -> None:
    program = captured_zoo("ema").program
    averages = {name for name in writes(program, Role.OPTIMIZE) if name.startswith("ema/")}
    assert averages


@pytest.mark.grid
def test_statistics_of_the_batch_are_forward() -> None:
    program = captured_zoo("cnn_batchnorm").program
    statistics = {v.name for v in program.variables.values() if "batch_stats" in v.name}
    assert statistics
    assert statistics <= set(writes(program, Role.FORWARD))


def test_the_loss_scale_is_found_behind_the_gradients() -> None:
    program = captured_zoo("loss_scaling").program
    assert {pair[0] for pair in gradients_of(program)} == set(params_of(program))


def test_a_step_that_trains_nothing_is_all_forward() -> None:
    step = jf.capture(
        lambda state, batch: (state, {"loss": loss(state, batch)}),
        example=({"b": jnp.zeros(2), "w": jnp.ones((3, 2))}, BATCH),
    )
    assert set(roles_of(step.program)) == {Role.FORWARD}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gan", "lstm", "transformer", "multisteps"])
def test_nothing_reads_what_a_later_part_makes(name: str) -> None:
    program = captured_zoo(name).program
    made: dict[str, int] = {}
    for place, op in enumerate(program.root.ops):
        made.update((written, place) for written in op.writes if written not in made)
    for place, op in enumerate(program.root.ops):
        assert all(made[read] < place for read in op.reads if read in program.root.variables)
