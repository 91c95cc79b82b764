"""Splitting branches over all parameters changes the structure of a step, not its results."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxfleet.analysis.optimizer_groups import RowLocality, split_branches
from jaxfleet.ir import Kind, Operands, Operator, Program, parse, verify
from jaxfleet.ops import Interpreter
from tests.analysis.groups_steps import check_slices, drawn, groups_of, lasting, run, step_of

BRANCHES: dict[str, optax.GradientTransformation] = {
    "multisteps": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    "multisteps_unless_not_finite": optax.MultiSteps(
        optax.adam(0.1), 3, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "both": optax.MultiSteps(
        optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
        2,
        should_skip_update_fn=partial(optax.skip_large_updates, max_squared_norm=100.0),
    ).gradient_transformation(),
}


def branching(update: Any) -> optax.GradientTransformation:
    """Returns an optimizer whose state is two copies of the parameters, and a counter."""

    def init(params: Any) -> Any:
        return {"first": params, "second": params, "count": jnp.zeros((), jnp.int32)}

    return optax.GradientTransformation(init, update)


def swapping(updates: Any, state: Any, params: Any = None) -> Any:
    """Swaps its state in one branch and leaves it in the other."""

    def swap(updates: Any, state: Any) -> Any:
        moved = jax.tree.map(jnp.add, state["first"], updates)
        swapped = {"first": state["second"], "second": moved, "count": state["count"] + 1}
        return state["first"], swapped

    def keep(updates: Any, state: Any) -> Any:
        return jax.tree.map(jnp.negative, updates), {**state, "count": state["count"] + 1}

    return lax.cond(state["count"] % 2 == 1, swap, keep, updates, state)


BRANCHES["swapping"] = branching(swapping)


def values_of(program: Program) -> dict[str, Any]:
    kinds = (Kind.PARAM, Kind.STATE)
    values: dict[str, Any] = {v.name: drawn(v, n) for n, v in enumerate(program.of_kind(*kinds))}
    return {**values, "batch": np.linspace(0.0, 1.0, 8, dtype=np.float32)}


def run_step(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    return lasting(program, jax.jit(Interpreter(program, {"b": 8}).run)(values))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BRANCHES)
def test_a_split_step_does_what_the_step_does(name: str) -> None:
    program = step_of(BRANCHES[name])
    split = split_branches(program)
    verify(split)
    assert parse(str(split)) == split
    assert split is not program
    values = values_of(program)
    wanted = run_step(program, values)
    for leaf, found in run_step(split, values).items():
        np.testing.assert_allclose(found, wanted[leaf], rtol=1e-6, err_msg=leaf)


def test_a_step_without_branches_is_returned_as_it_is() -> None:
    program = step_of(optax.adam(0.1))
    assert split_branches(program) is program


def test_splitting_again_changes_nothing() -> None:
    split = split_branches(step_of(BRANCHES["both"]))
    assert split_branches(split) is split


@pytest.mark.parametrize("name", ["swapping", "multisteps_unless_not_finite", "apply_if_finite"])
def test_every_parameter_gets_a_branch_of_its_own(name: str) -> None:
    groups = groups_of(BRANCHES[name])
    for group in groups.groups:
        branches = [op for op in group.program.root.ops if op.type == "jax.cond"]
        assert branches, str(group.program)
        other = {"params/b": "/w", "params/w": "/b"}[group.name]
        assert not any(name.endswith(other) for op in branches for name in op.reads)


def test_swapped_state_is_split_and_exact_on_slices() -> None:
    groups = groups_of(BRANCHES["swapping"])
    assert groups.lr_state == ("opt/count",)
    for group in groups.groups:
        assert group.is_separable
        assert group.rows is RowLocality.LOCAL, group.reason
        check_slices(group)


def test_a_branch_that_mixes_parameters_stays_one_and_says_where() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def clipped(updates: Any) -> Any:
            norm = optax.tree.norm(updates)
            return jax.tree.map(lambda g: g / norm, updates)

        scaled = lax.cond(state["count"] > 3, clipped, lambda updates: updates, updates)
        return scaled, {**state, "count": state["count"] + 1}

    groups = groups_of(branching(update))
    types = [groups.program.root.ops[place].type for place in groups.crossing_ops]
    assert types == ["jax.cond"]
    for group in groups.groups:
        assert not group.is_separable
        assert group.crossing is not None
        assert group.crossing.op is not None
        assert group.crossing.op.type == "jax.add"  # inside the branch
        assert group.rows is RowLocality.WHOLE


def test_one_branch_after_another_is_split_twice() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count = state["count"]
        for bound in (1, 2):
            updates = lax.cond(
                optax.tree.norm(updates) > bound,
                lambda updates: jax.tree.map(lambda g: 0.5 * g, updates),
                lambda updates: updates,
                updates,
            )
        return updates, {**state, "count": count + 1}

    groups = groups_of(branching(update))
    for group in groups.groups:
        assert sum(op.type == "jax.cond" for op in group.program.root.ops) == 2
        assert group.rows is RowLocality.REDUCING


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
        optax.lamb(0.1),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
        BRANCHES["both"],
        BRANCHES["multisteps"],
        optax.adafactor(0.1, min_dim_size_to_factor=2),
    ],
    ids=["adamw", "lamb", "clipping", "branches", "multisteps", "adafactor"],
)
def test_a_group_on_its_own_does_what_it_does_in_the_step(
    optimizer: optax.GradientTransformation,
) -> None:
    groups = groups_of(optimizer)
    values = values_of(groups.program)
    shared = {name for group in groups.groups for name in (*group.gradients, *group.shared)}
    scope = Interpreter(fetching(groups.program, shared), {"b": 8}).run(values)
    wanted = lasting(groups.program, scope)
    for group in groups.groups:
        fed = {v.name: scope[v.name] for v in group.program.of_kind(Kind.DATA)}
        own = {v.name: values[v.name] for v in group.program.of_kind(Kind.PARAM, Kind.STATE)}
        for leaf, found in run(group.program, {**fed, **own}).items():
            np.testing.assert_array_equal(found, wanted[leaf], err_msg=leaf)


def fetching(program: Program, names: set[str]) -> Program:
    """Returns a program in which these variables stay alive to the end."""
    fetch = Operator("fetch", Operands.of(*sorted(names)))
    return program.with_block(program.root.with_ops((*program.root.ops, fetch)))
