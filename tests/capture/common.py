"""Helpers for tests of capture: captured programs, and running them on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfleet as jf
from jaxfleet.ir import Kind, Operator, Program, Role
from jaxfleet.ops import Array, Interpreter


def replay(captured: jf.Captured, state: Any, batch: Any) -> tuple[Any, Any]:
    """Returns the results of the captured program, as the step would."""
    signature = captured.signature
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    names = [leaf.name for leaf in (*signature.state, *signature.batch)]
    rows = next(x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x))

    def run(leaves: list[Array]) -> tuple[list[Array], list[Array]]:
        values = dict(zip(names, leaves, strict=True))
        after = Interpreter(captured.program, {"b": rows}).run(values)
        new_state = [after[leaf.name] for leaf in signature.state]
        return new_state, [after[name] for name in captured.metrics]

    new_state, metrics = jax.jit(run)(leaves)
    unflatten = jax.tree.unflatten
    return unflatten(signature.state_tree, new_state), unflatten(captured.metrics_tree, metrics)


def assert_same_as_the_step(
    step: Callable[[Any, Any], Any], state: Any, batch: Any, captured: jf.Captured | None = None
) -> jf.Captured:
    """Fails unless a step and its captured program agree bit by bit; returns the capture.

    Args:
        step: a training step.
        state: its argument.
        batch: its argument.
        captured: the step, if it was captured before.
    """
    captured = captured or jf.capture(step, example=(state, batch))
    wanted, found = jax.jit(step)(state, batch), replay(captured, state, batch)
    structure: Any = jax.tree.structure(wanted)
    assert structure == jax.tree.structure(found)
    for (path, x), y in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        where = jax.tree_util.keystr(path)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), where
        assert bits(x) == bits(y), where
    return captured


def bits(value: Array) -> bytes:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def params_of(program: Program) -> list[str]:
    return [variable.name for variable in program.of_kind(Kind.PARAM)]


def gradients_of(program: Program) -> list[tuple[str, str]]:
    return [pair for op in program.root.ops for pair in op.role_var]


def with_role(program: Program, role: Role) -> list[Operator]:
    return [op for op in program.root.ops if op.role is role]


def op_types(program: Program) -> list[str]:
    return [op.type for block in program.blocks for op in block.ops]
