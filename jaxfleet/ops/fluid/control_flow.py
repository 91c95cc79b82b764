"""Operators with sub-blocks and their gradients, and the row split and merge of `IfElse`.

A sub-block refers to enclosing variables by name, and its operator lists those it reads and writes.
A gradient operator has a copy of the block with its own names for these variables: `reads` lists
them in the order of the operator's inputs, `writes` in that of its outputs. So its operands may be
renamed, and may be earlier values of variables that the block overwrites. The slot `Beside` has
reads of the block that layers do not list: lengths of sequences, and the run number that keys
random operators; `jaxfleet.fluid.lowering.rewrites` fills it.

The gradient of a loop needs the values at the start of every trip. A loop of unknown length cannot
store them all in arrays of fixed size, so some are stored at equal distances and those between are
recomputed from the nearest earlier one (checkpointing at a uniform stride, as in Griewank and
Walther, "Evaluating Derivatives", 2008, chapter 12).

An array on a device keeps its size, so both branches of `IfElse` get all rows: rows of the other
branch are replaced by copies of one row of this branch, whose results are not used.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.ir import Block, Operator, block_of
from jaxfleet.ops.fluid.arrays import RUN
from jaxfleet.ops.fluid.schema import Attributes, Value, define_block_gradient, describe, fluid_op
from jaxfleet.ops.registry import Array, Context, register_op

Values: TypeAlias = dict[str, Array]
Condition: TypeAlias = Callable[[Values], Array]
Turn: TypeAlias = Callable[[Values, Values], Values]

_KEPT = 64  # a loop of n trips recomputes up to n * n / 128 of them


def differentiable_while(
    condition: Condition, turn: Turn, carried: Values, constant: Values
) -> Values:
    """`jax.lax.while_loop` with reverse mode; `turn(carried, constant)` is the body.

    Costs the time of one more loop and of the recomputed trips, and the memory of 64 copies of the
    carried values.
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
    def counted(state: tuple[Values, Array]) -> tuple[Values, Array]:
        return turn(state[0], constant), state[1] + 1

    start = (carried, jnp.asarray(0, jnp.int32))
    _, turns = jax.lax.while_loop(lambda state: condition(state[0]), counted, start)
    return turns


def _kept(turn: Turn, carried: Values, constant: Values, turns: Array, stride: Array) -> Values:
    """The carried values at the start of every trip whose number is a multiple of the stride."""
    room = jax.tree_util.tree_map(lambda x: jnp.zeros((_KEPT, *x.shape), x.dtype), carried)

    def step(at: Array, state: tuple[Values, Values]) -> tuple[Values, Values]:
        now, kept = state
        place = jnp.where(at % stride == 0, at // stride, _KEPT)  # beyond the end: dropped
        kept = jax.tree_util.tree_map(lambda k, x: k.at[place].set(x, mode="drop"), kept, now)
        return turn(now, constant), kept

    kept: Values = jax.lax.fori_loop(0, turns, step, (carried, room))[1]
    return kept


def _parted(values: Values) -> tuple[Values, Values]:
    """Splits values into differentiable ones and others."""
    found = {n: x for n, x in values.items() if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)}
    return found, {name: x for name, x in values.items() if name not in found}


def _with_no_gradients(found: Values, like: Values) -> Values:
    """Adds the gradients that JAX expects for integers."""
    return {
        name: found[name] if name in found else np.zeros(np.shape(x), jax.dtypes.float0)
        for name, x in like.items()
    }


_NEXT_TURN = 0x85EBCA6B  # odd, and far from the keys of devices
BESIDE = "Beside"  # slot, and in lower case the attribute of a gradient operator with the names


def names_read(op: Operator) -> tuple[str, ...]:
    """The sub-block's names of the operator's inputs, in order."""
    if "reads" not in op.attrs:
        return op.reads
    return (*_texts(op, "reads"), *_texts(op, BESIDE.lower()))


def names_written(op: Operator) -> tuple[str, ...]:
    """The sub-block's names of the operator's outputs, in order."""
    return _texts(op, "writes") if "writes" in op.attrs else op.writes


def sub_block(ctx: Context, op: Operator) -> Block:
    """The block that an operator runs."""
    return block_of(ctx.program, op.attrs["sub_block"])


def values_held(op: Operator, values: Sequence[Array]) -> dict[str, Array]:
    """An operator's inputs, by the sub-block's names."""
    return dict(zip(names_read(op), values, strict=True))


def _texts(op: Operator, name: str) -> tuple[str, ...]:
    found: Any = op.attrs.get(name, ())
    return tuple(map(str, found))


def _begun(
    names: Sequence[str], held: Mapping[str, Array], run: Callable[[], Mapping[str, Array]]
) -> dict[str, Array]:
    """Values of names before a block runs; zeros for unset ones."""
    missing = [name for name in names if name not in held]
    made = jax.eval_shape(run) if missing else {}
    zeros = {name: jnp.zeros(made[name].shape, made[name].dtype) for name in missing}
    return {name: zeros[name] if name in zeros else jnp.asarray(held[name]) for name in names}


def next_run(held: Mapping[str, Array]) -> dict[str, Array]:
    """The key of random operators for the next trip of a loop, if there are any."""
    return {RUN: held[RUN] + jnp.uint32(_NEXT_TURN)} if RUN in held else {}


@register_op("conditional_block")
def conditional_block(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block if `Cond` is true; otherwise `Out` is unchanged, or zero."""
    held, names = values_held(op, inputs), names_written(op)
    condition, block = _first_of(op, "Cond", inputs), sub_block(ctx, op)

    def run() -> dict[str, Array]:
        after = ctx.run_scope(block, held, keep=names)
        return {name: jnp.asarray(after[name]) for name in names}

    kept = _begun(names, held, run)
    made = jax.lax.cond(condition.reshape(()), run, lambda: kept)
    return [made[name] for name in names]


@register_op("while")
def while_op(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block while `Condition` is true; `Out` is what the block changes."""
    held, names, block = values_held(op, inputs), names_written(op), sub_block(ctx, op)
    given = str(op.inputs.slot("Condition")[0])
    condition = dict(zip(op.reads, names_read(op), strict=True))[given]

    def once(carried: dict[str, Array], constant: dict[str, Array]) -> dict[str, Array]:
        values = {**constant, **carried}
        after = ctx.run_scope(block, values, keep=names)
        return {**{name: after[name] for name in names}, **next_run(values)}

    def goes_on(carried: dict[str, Array]) -> Array:
        return carried[condition].reshape(())

    before = _begun(names, held, lambda: once({}, held))
    before |= {name: held[name] for name in (RUN,) if name in held}
    constant = {name: x for name, x in held.items() if name not in before}
    trips = op.attrs.get("max_trips")
    if trips is None:
        after = jax.lax.while_loop(goes_on, lambda carried: once(carried, constant), before)
    elif trips:
        after = _bounded(int(str(trips)), goes_on, lambda x: once(x, constant), before)
    else:
        after = differentiable_while(goes_on, once, before, constant)
    return [after[name] for name in names]


def _bounded(
    trips: int,
    goes_on: Callable[[dict[str, Array]], Array],
    once: Callable[[dict[str, Array]], dict[str, Array]],
    before: dict[str, Array],
) -> dict[str, Array]:
    """Runs a loop with a bound on its trips, in a form that reverse mode differentiates."""

    def turn(carried: dict[str, Array], _: None) -> tuple[dict[str, Array], None]:
        return jax.lax.cond(goes_on(carried), once, lambda x: x, carried), None

    after: dict[str, Array] = jax.lax.scan(turn, before, None, length=trips)[0]
    return after


def _first_of(op: Operator, slot: str, inputs: Sequence[Array]) -> Array:
    rest = iter(inputs)
    return {name: [next(rest) for _ in operands] for name, operands in op.inputs.slots}[slot][0]


describe("while", inputs="Condition X*? Beside*?", outputs="Out*", attrs={"sub_block": None},
         gradient="Condition X Beside -> X")  # fmt: skip
describe("conditional_block", inputs="Cond Input*? Beside*?", outputs="Out*",
         attrs={"sub_block": None, "is_scalar_condition": False},
         gradient="Cond Input Beside -> Input")  # fmt: skip
define_block_gradient("while", {"max_trips": 0})
define_block_gradient("conditional_block")


def _only(x: Array, flags: Array) -> Array:
    """Replaces rows without the flag by copies of the first row with it."""
    return x[jnp.where(flags, jnp.arange(x.shape[0]), jnp.argmax(flags))]


@fluid_op("split_lod_tensor", inputs="X Mask", outputs="OutTrue OutFalse", gradient="X Mask -> X")
def split_lod_tensor(_: Attributes, x: Array, mask: Array) -> Value:
    """Selects the rows for which a mask is true, and the others."""
    flags = mask.reshape(-1).astype(bool)
    return _only(x, flags), _only(x, ~flags)


@fluid_op("merge_lod_tensor", inputs="Mask InTrue InFalse",
          gradient="Mask InTrue InFalse -> InTrue InFalse")  # fmt: skip
def merge_lod_tensor(_: Attributes, mask: Array, if_true: Array, if_false: Array) -> Array:
    """Merges rows from two sides by a mask."""
    flags = mask.reshape(-1, *[1] * (if_true.ndim - 1)).astype(bool)
    return jnp.where(flags, if_true, if_false)
