"""Blocks that run once for each step of sequences: `recurrent` (StaticRNN), `dynamic_recurrent`.

A block reads one step of each input, the states as the step before left them, and whatever it likes
of the variables around it (`parameters`). The attributes have its names for them: `step_inputs`,
`ex_states`, `states` (what the states become) and `step_outputs`. Steps are a `scan`, which reverse
mode differentiates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxfleet.ir import Operator
from jaxfleet.ops.fluid.arrays import device_dtype
from jaxfleet.ops.fluid.control import BESIDE, names_read, next_run, sub_block
from jaxfleet.ops.fluid.gradients import define_block_gradient
from jaxfleet.ops.fluid.random import RUN
from jaxfleet.ops.fluid.schema import (
    Attributes,
    Gradient,
    Schema,
    describe,
    fluid_op,
    slots,
)
from jaxfleet.ops.fluid.sequences import owners_of, starts_of
from jaxfleet.ops.registry import Array, Context, register_op

_OF_ROWS = ("inputsLengths", "inputsRoom")  # of the operator, and not of its block
Named: TypeAlias = list[tuple[str, Array]]
Values: TypeAlias = dict[str, Array]
Step: TypeAlias = Callable[[Values, Values], tuple[Values, list[Array]]]


def _by_slot(op: Operator, values: Sequence[Array]) -> dict[str, Named]:
    """Returns the names that a block has for its operator's inputs, with their values, by slot."""
    known, rest = iter(names_read(op)), iter(values)
    is_copy = "reads" in op.attrs
    found: dict[str, Named] = {}
    for slot, operands in op.inputs.slots:
        unnamed = is_copy and slot in _OF_ROWS
        found[slot] = [("" if unnamed else next(known), next(rest)) for _ in operands]
    return found


def _names(op: Operator, attr: str) -> list[str]:
    found: Any = op.attrs.get(attr, ())
    return [str(name) for name in found]


def _step_of(ctx: Context, op: Operator, around: Values) -> Step:
    """Returns one step: from states and inputs to the next states and outputs."""
    block, wanted = sub_block(ctx, op), _names(op, "step_outputs")
    before, after = _names(op, "ex_states"), _names(op, "states")

    def step(carried: Values, inputs: Values) -> tuple[Values, list[Array]]:
        held = {**around, **carried, **inputs}
        made = ctx.run_scope(block, held, keep=(*after, *wanted))
        states = {
            old: made[new].astype(carried[old].dtype)
            for old, new in zip(before, after, strict=True)
        }
        return {**states, **next_run(held)}, [made[name] for name in wanted]

    return step


def _around(given: Mapping[str, Named]) -> Values:
    """Returns what a block reads of the variables around it."""
    return dict(given.get("parameters", [])) | dict(given.get(BESIDE, []))


def _carried(op: Operator, given: Mapping[str, Named], around: Mapping[str, Array]) -> Values:
    """Returns what the first step begins with."""
    states = [value for _, value in given.get("initial_states", [])]
    run = {RUN: around[RUN]} if RUN in around else {}
    return {**dict(zip(_names(op, "ex_states"), states, strict=True)), **run}


@register_op("recurrent")
def recurrent(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
    """Runs its block for each element of its inputs' first axis; outputs are stacked along it."""
    given = _by_slot(op, values)
    inputs = dict(zip(_names(op, "step_inputs"), (x for _, x in given["inputs"]), strict=True))
    around = _around(given)
    step, start = _step_of(ctx, op, around), _carried(op, given, around)
    return list(jax.lax.scan(step, start, inputs, reverse=bool(op.attrs.get("reverse")))[1])


@register_op("dynamic_recurrent")
def dynamic_recurrent(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
    """Runs its block for each step of sequences, all of them at once; outputs are their rows.

    A sequence that has ended keeps its state, and what the block makes of it is dropped.
    """
    given = _by_slot(op, values)
    if "inputsLengths" not in given:
        raise ValueError("its input has no sequences: their lengths are not known")
    lengths, rows = given["inputsLengths"][0][1], given["inputs"][0][1].shape[0]
    count = given["inputsRoom"][0][1].shape[0] if "inputsRoom" in given else rows
    at = jnp.clip(starts_of(lengths) + jnp.arange(count)[:, None], 0, rows - 1)
    named = zip(_names(op, "step_inputs"), given["inputs"], strict=True)
    inputs = {name: x[at] for name, (_, x) in named}
    around = _around(given)
    step, start = _step_of(ctx, op, around), _carried(op, given, around)

    def masked(carried: Values, now: tuple[Array, Values]) -> tuple[Values, list[Array]]:
        number, read = now
        made, kept = step(carried, read)
        goes_on = number < lengths
        return {
            name: new if name == RUN else jnp.where(_beside(goes_on, new), new, carried[name])
            for name, new in made.items()
        }, kept

    _, kept = jax.lax.scan(masked, start, (jnp.arange(count), inputs))
    return [_rows_of(made, rows, lengths) for made in kept]


def _beside(flags: Array, x: Array) -> Array:
    return flags.reshape(-1, *[1] * (x.ndim - 1))


def _rows_of(made: Array, rows: int, lengths: Array) -> Array:
    """Returns `[steps, sequences, ...]` as the rows of the sequences; rows of none are zero."""
    owners = owners_of(rows, lengths)
    at = jnp.clip(owners, 0, lengths.shape[0] - 1)
    step = jnp.clip(jnp.arange(rows) - starts_of(lengths)[at], 0, made.shape[0] - 1)
    found = made[step, at]
    return jnp.where(_beside(owners < lengths.shape[0], found), found, jnp.zeros_like(found))


@fluid_op("fill_constant_per_sequence", inputs="X XLengths?",
          attrs={"shape": [], "value": 0.0, "dtype": "float32"})  # fmt: skip
def fill_constant_per_sequence(attrs: Attributes, _: Array, lengths: Array | None) -> Array:
    """Makes an array of one value for each sequence: `[b, *shape]`."""
    if lengths is None:
        raise ValueError("its input has no sequences: their number is not known")
    shape = (lengths.shape[0], *attrs["shape"])
    return jnp.full(shape, attrs["value"], device_dtype(attrs["dtype"]))


_NAMES: Mapping[str, Any] = {
    "sub_block": None,
    "step_inputs": [],
    "ex_states": [],
    "states": [],
    "step_outputs": [],
}
_READ = ("inputs", "initial_states", "parameters")
describe(
    Schema(
        "recurrent",
        slots("inputs* initial_states*? parameters*? Beside*?"),
        slots("outputs*"),
        {**_NAMES, "reverse": False},
        Gradient("recurrent_grad", (*_READ, BESIDE), _READ),
    )
)
describe(
    Schema(
        "dynamic_recurrent",
        slots("inputs* initial_states*? parameters*? inputsLengths? inputsRoom? Beside*?"),
        slots("outputs*"),
        _NAMES,
        Gradient("dynamic_recurrent_grad", (*_READ, *_OF_ROWS, BESIDE), _READ),
    )
)
define_block_gradient("recurrent")
define_block_gradient("dynamic_recurrent")
