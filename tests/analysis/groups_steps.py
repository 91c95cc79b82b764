"""Captures small training steps around an optimizer, and runs optimize groups alone."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfleet.analysis.optimizer_groups import (
    OptimizerGroup,
    OptimizerGroups,
    cut_rows,
    find_optimizer_groups,
)
from jaxfleet.analysis.optimizer_groups.row_locality import ROWS as ROWS_LETTER
from jaxfleet.capture import distributed_optimizer
from jaxfleet.capture.signature import Signature
from jaxfleet.capture.trace import trace
from jaxfleet.ir import Kind, Program, Variable, letter, parse, verify
from jaxfleet.ops import Interpreter

Values = dict[str, Any]
ROWS = 8
# For two or four elements XLA:CPU computes as for more. For one it divides by a scalar differently,
# and for three it uses another exp and log: the last digit differs.
SLICES = ((0, 2), (2, 4), (4, 8))
PARAMS = {
    "b": np.linspace(-1.0, 1.0, ROWS, dtype=np.float32),
    "w": np.linspace(0.1, 2.0, 4 * ROWS, dtype=np.float32).reshape(ROWS, 4),
}


def step_of(tx: optax.GradientTransformation, params: Any = None) -> Program:
    """Returns a step whose loss is a sum of squares, captured once: nothing is compiled."""
    wrapped, weights = distributed_optimizer(tx), PARAMS if params is None else params

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(batch) * optax.tree.norm(params, squared=True)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = wrapped.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
            "loss": value
        }

    state = {"params": weights, "opt": tx.init(weights)}
    return trace(step, Signature.of(state, np.ones(8, np.float32)), rows=None, name="step").program


def groups_of(tx: optax.GradientTransformation, params: Any = None) -> OptimizerGroups:
    return find_optimizer_groups(step_of(tx, params))


def on_gradients(function: Callable[[jax.Array], Any]) -> optax.GradientTransformation:
    """Returns SGD whose update is a function of each gradient of more than one axis."""

    def change(gradient: jax.Array) -> jax.Array:
        return -0.1 * (function(gradient) if gradient.ndim > 1 else gradient)

    return optax.stateless(lambda updates, _: jax.tree.map(change, updates))


def w_of(tx: optax.GradientTransformation, params: Any = None) -> OptimizerGroup:
    """Returns the group of the matrix."""
    return groups_of(tx, params).group("params/w")


def drawn(variable: Variable, seed: int) -> np.ndarray[Any, Any]:
    """Draws a value that an optimizer could meet: positive, and not small."""
    rng, shape = np.random.default_rng(seed), [int(str(size)) for size in variable.shape]
    if variable.dtype == "bool":
        return np.ones(shape, bool)
    if variable.dtype[0] in "iu":
        return np.full(shape, 3, variable.dtype.replace("i", "int", 1))
    signed = rng.choice([-1.0, 1.0], shape) if variable.name.endswith("@GRAD") else 1.0
    return np.asarray(signed * rng.uniform(0.1, 0.9, shape), np.float32)


def inputs_of(program: Program) -> Values:
    kinds = (Kind.DATA, Kind.PARAM, Kind.STATE)
    return {v.name: drawn(v, seed) for seed, v in enumerate(program.of_kind(*kinds))}


def lasting(program: Program, scope: Mapping[str, Any]) -> Values:
    """Returns the final parameters and state of a program."""
    return {v.name: np.asarray(scope[v.name]) for v in program.of_kind(Kind.PARAM, Kind.STATE)}


def run(program: Program, values: Values, sizes: Mapping[str, int] | None = None) -> Values:
    """Runs a program operator by operator; returns its persistent values."""
    return lasting(program, Interpreter(program, dict(sizes or {})).run(values))


def check_slices(group: OptimizerGroup, *, exact: bool = True) -> None:
    """Checks that a group computes the same on slices of its rows as on the whole.

    Args:
        group: a row-local group of eight rows.
        exact: bitwise; else to float32's last digits, for sums in another order.
    """
    program = cut_rows(group)
    verify(program)
    assert parse(str(program)) == program
    cut = {v.name for v in program.variables.values() if v.shape[:1] == (letter(ROWS_LETTER),)}
    values = inputs_of(group.program)
    whole = run(group.program, values)
    for start, end in SLICES:
        rows = {name: x[start:end] if name in cut else x for name, x in values.items()}
        found = run(program, rows, {ROWS_LETTER: end - start})
        for name, value in found.items():
            wanted = whole[name][start:end] if name in cut else whole[name]
            if exact:
                np.testing.assert_array_equal(value, wanted, err_msg=name)
            else:
                np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=name)
