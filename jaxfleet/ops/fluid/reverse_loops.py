"""The gradient of a loop whose number of turns is known only when it runs.

Reverse mode needs the values that every turn began with. A loop of unknown length cannot keep them
all in arrays of a fixed size; so some are kept, at equal distances, and those between are computed
again from the nearest before (checkpointing at a uniform stride, as in Griewank and Walther,
"Evaluating Derivatives", 2008, chapter 12).
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.ops.registry import Array

Values: TypeAlias = dict[str, Array]
Condition: TypeAlias = Callable[[Values], Array]
Turn: TypeAlias = Callable[[Values, Values], Values]

_KEPT = 64  # a loop of n turns computes up to n * n / 128 of them again


def differentiable_while(
    condition: Condition, turn: Turn, carried: Values, constant: Values
) -> Values:
    """Runs `turn(carried, constant)` while a condition on what is carried holds.

    As `jax.lax.while_loop`, but reverse mode works. Time grows by one loop and by the turns that
    are computed again; memory by 64 copies of what is carried.
    """

    @jax.custom_vjp
    def loop(carried: Values, constant: Values) -> Values:
        made: Values = jax.lax.while_loop(condition, lambda x: turn(x, constant), carried)
        return made

    def forward(carried: Values, constant: Values) -> tuple[Values, tuple[Values, Values]]:
        return loop(carried, constant), (carried, constant)

    def backward(saved: tuple[Values, Values], grads: Values) -> tuple[Values, Values]:
        return _backward(condition, turn, *saved, grads)

    loop.defvjp(forward, backward)
    after: Values = loop(carried, constant)
    return after


def _backward(
    condition: Condition, turn: Turn, carried: Values, constant: Values, grads: Values
) -> tuple[Values, Values]:
    turns = _count(condition, turn, carried, constant)
    stride = jnp.maximum((turns + _KEPT - 1) // _KEPT, 1)
    kept = _kept(turn, carried, constant, turns, stride)
    floats, whole = _parted(constant)

    def values_before(number: Array) -> Values:
        nearest = jax.tree_util.tree_map(lambda x: x[number // stride], kept)
        found: Values = jax.lax.fori_loop(
            0, number % stride, lambda _, x: turn(x, constant), nearest
        )
        return found

    def back(at: Array, state: tuple[Values, Values]) -> tuple[Values, Values]:
        grads, sums = state
        before, fixed = _parted(values_before(turns - 1 - at))

        def of_floats(before: Values, given: Values) -> Values:
            return _parted(turn({**before, **fixed}, {**given, **whole}))[0]

        _, pull = jax.vjp(of_floats, before, floats)
        grads, more = pull(grads)
        return grads, jax.tree_util.tree_map(jnp.add, sums, more)

    begun = {name: grads[name] for name in _parted(carried)[0]}
    zeros = jax.tree_util.tree_map(jnp.zeros_like, floats)
    found, sums = jax.lax.fori_loop(0, turns, back, (begun, zeros))
    return _with_no_gradients(found, carried), _with_no_gradients(sums, constant)


def _count(condition: Condition, turn: Turn, carried: Values, constant: Values) -> Array:
    """Returns how many turns the loop takes."""

    def counted(state: tuple[Values, Array]) -> tuple[Values, Array]:
        return turn(state[0], constant), state[1] + 1

    start = (carried, jnp.asarray(0, jnp.int32))
    _, turns = jax.lax.while_loop(lambda state: condition(state[0]), counted, start)
    return turns


def _kept(turn: Turn, carried: Values, constant: Values, turns: Array, stride: Array) -> Values:
    """Returns what was carried into every turn whose number is a multiple of the stride."""
    room = jax.tree_util.tree_map(lambda x: jnp.zeros((_KEPT, *x.shape), x.dtype), carried)

    def step(at: Array, state: tuple[Values, Values]) -> tuple[Values, Values]:
        now, kept = state
        place = jnp.where(at % stride == 0, at // stride, _KEPT)  # beyond the end: dropped
        kept = jax.tree_util.tree_map(lambda k, x: k.at[place].set(x, mode="drop"), kept, now)
        return turn(now, constant), kept

    kept: Values = jax.lax.fori_loop(0, turns, step, (carried, room))[1]
    return kept


def _parted(values: Values) -> tuple[Values, Values]:
    """Returns the values that have gradients, and the others."""
    found = {n: x for n, x in values.items() if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)}
    return found, {name: x for name, x in values.items() if name not in found}


def _with_no_gradients(found: Values, like: Values) -> Values:
    """Adds what JAX takes for the gradient of a whole number."""
    return {
        name: found[name] if name in found else np.zeros(np.shape(x), jax.dtypes.float0)
        for name, x in like.items()
    }
