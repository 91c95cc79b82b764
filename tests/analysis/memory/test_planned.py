"""Plans of a captured step, applied by the pass: results and memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.analysis.memory import (
    Chain,
    RecomputePlan,
    memory_profile,
    peak_of,
    plan_for,
    smallest_budget,
    stages_of,
)
from jaxfleet.ir import Kind, Program
from jaxfleet.ops import Interpreter
from jaxfleet.passes.memory.recompute import Recompute

ROWS, WIDTH = 512, 32
SIZES = {"b": ROWS}
Values = dict[str, Any]


def step_under_test() -> tuple[Program, Values]:
    """Captures four residual blocks with Adam and global clipping; returns values to run it on."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = [
        {
            "w": jax.random.normal(next(keys), (WIDTH, 4 * WIDTH)) / 6,
            "v": jax.random.normal(next(keys), (4 * WIDTH, WIDTH)) / 12,
        }
        for _ in range(4)
    ]
    tx = jf.distributed_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            h = batch
            for block in params:
                h = h + jax.nn.gelu(h @ block["w"]) @ block["v"]
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, held = tx.update(grads, state["tx"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "tx": held}, value

    state = {"params": params, "tx": tx.init(params)}
    batch = jax.random.normal(next(keys), (ROWS, WIDTH))
    captured = jf.capture(train_step, example=(state, batch))
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    named = (*captured.signature.state, *captured.signature.batch)
    return captured.program, {leaf.name: value for leaf, value in zip(named, leaves, strict=True)}


@pytest.fixture(scope="module")
def step() -> tuple[Program, Values, Chain]:
    program, values = step_under_test()
    return program, values, stages_of(program, SIZES)


def planned(program: Program, plan: RecomputePlan) -> Program:
    return Recompute(plan.cuts, plan.kept, tuple(sorted(plan.saved))).run(program)


def states_after(program: Program, values: Values) -> Values:
    after = Interpreter(program, SIZES).run(values)
    return {v.name: after[v.name] for v in program.of_kind(Kind.PARAM, Kind.STATE)}


@pytest.mark.grid
def test_a_planned_step_computes_the_same(step: tuple[Program, Values, Chain]) -> None:
    program, values, chain = step
    _, plan = smallest_budget(chain)
    assert len(plan.cuts) > 2
    expected, found = states_after(program, values), states_after(planned(program, plan), values)
    for name, value in expected.items():
        # The same operators on the same numbers, each by itself: rounding is the same.
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.grid
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
def test_a_planned_step_holds_what_its_plan_says(
    step: tuple[Program, Values, Chain], part: float
) -> None:
    program, _, chain = step
    least, _ = smallest_budget(chain)
    as_is = int(chain.levels[-1].held[0, chain.stages])
    assert least < as_is / 2
    plan = plan_for(chain, int(least + part * (as_is - least)))
    assert plan is not None
    curve = memory_profile(planned(program, plan), SIZES)
    # A plan has a fact that the curve lacks: a gradient may reuse the memory of the incoming one.
    assert 0.75 <= curve.peak / peak_of(chain, plan) <= 1.25


@pytest.mark.grid
def test_xla_needs_about_what_the_curve_says(step: tuple[Program, Values, Chain]) -> None:
    program, values, _ = step
    fetched = [name for op in program.root.ops if op.type == "fetch" for name in op.reads]

    def run(given: Values) -> Values:
        after = Interpreter(program, SIZES).run(given)
        states = program.of_kind(Kind.PARAM, Kind.STATE)
        return {name: after[name] for name in (*(v.name for v in states), *fetched)}

    memory = jax.jit(run).lower(values).compile().memory_analysis()
    assert memory is not None
    # Only XLA decides the fusion and the order of operators.
    assert memory_profile(program, SIZES).peak == pytest.approx(memory.temp_size_in_bytes, rel=0.25)
