"""Recurrent operators: `lstm`, `gru`, and blocks run for each time step (StaticRNN, DynamicRNN).

`lstm` and `gru` scan the rows of all sequences consecutively and reset the state at the start of
each sequence, so the number of steps is the total number of rows, whatever the lengths.

A step block reads one step of each input, the states of the previous step, and any enclosing
variable (`parameters`). The attributes hold the block's names for them: `step_inputs`, `ex_states`,
`states` (the new states) and `step_outputs`. Steps are a `scan`, which supports reverse mode.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxfleet.ir import Operator
from jaxfleet.ops.fluid.arrays import RUN, device_dtype
from jaxfleet.ops.fluid.control_flow import BESIDE, names_read, next_run, sub_block
from jaxfleet.ops.fluid.schema import Attributes, Value, define_block_gradient, describe, fluid_op
from jaxfleet.ops.fluid.sequences import owners_of, starts_of
from jaxfleet.ops.registry import Array, Context, register_op

CellStep: TypeAlias = Callable[[Any, Array], tuple[Any, Any]]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "identity": lambda x: x,
}


def scan_rows(
    step: CellStep, rows: Array, initial: Any, lengths: Array | None, *, reverse: bool = False
) -> Any:
    """Scans the rows of each sequence.

    Args:
        step: maps state and row to the next state and the output.
        rows: f32[rows,width].
        initial: state at the start of each sequence, f32[b,width] leaf by leaf.
        lengths: i32[b].
        reverse: scan each sequence from its end.
    """
    owners = owners_of(rows.shape[0], lengths)
    assert lengths is not None
    at = jnp.clip(owners, 0, lengths.shape[0] - 1)
    edge = starts_of(lengths) + (lengths - 1 if reverse else 0)
    is_first = jnp.arange(rows.shape[0]) == edge[at]
    first = jax.tree_util.tree_map(lambda x: x[at], initial)

    def body(state: Any, now: tuple[Array, Array, Any]) -> tuple[Any, Any]:
        row, begins, start = now
        state = jax.tree_util.tree_map(lambda x, y: jnp.where(begins, y, x), state, start)
        return step(state, row)

    zeros = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape[1:], x.dtype), initial)
    _, kept = jax.lax.scan(body, zeros, (rows, is_first, first), reverse=reverse)
    return kept


def _initial(given: Array | None, lengths: Array | None, width: int, like: Array) -> Array:
    count = 1 if lengths is None else lengths.shape[0]
    return jnp.zeros((count, width), like.dtype) if given is None else given


@fluid_op("lstm", inputs="Input H0? C0? Weight Bias InputLengths?",
          outputs="Hidden Cell BatchGate BatchCellPreAct",
          attrs={"use_peepholes": True, "is_reverse": False, "gate_activation": "sigmoid",
                 "cell_activation": "tanh", "candidate_activation": "tanh"},
          gradient="Input H0 C0 Weight Bias InputLengths -> Input H0 C0 Weight Bias")  # fmt: skip
def lstm(
    attrs: Attributes, x: Array, h0: Array | None, c0: Array | None, weight: Array, bias: Array,
    lengths: Array | None,
) -> Value:  # fmt: skip
    """LSTM over projected rows: f32[rows,4*d], gates in the order c, i, f, o.

    The bias has four parts of `d`, and with peepholes three more, the weights of the cell in the
    gates i, f and o (Gers and Schmidhuber, 2000).
    """
    width = weight.shape[0]
    gate, act, candidate = (
        _ACTIVATIONS[attrs[f"{which}_activation"]] for which in ("gate", "cell", "candidate")
    )
    parts = jnp.split(bias.reshape(-1), bias.size // width)
    into_i, into_f, into_o = parts[4:] if attrs["use_peepholes"] else (0.0, 0.0, 0.0)
    offset = jnp.concatenate(parts[:4])

    def step(state: tuple[Array, Array], row: Array) -> tuple[Any, Any]:
        hidden, cell = state
        pre = jnp.split(row + hidden @ weight + offset, 4)
        new, i, f = candidate(pre[0]), gate(pre[1] + into_i * cell), gate(pre[2] + into_f * cell)
        cell = f * cell + i * new
        o = gate(pre[3] + into_o * cell)
        made = (o * act(cell), cell)
        return made, (*made, jnp.concatenate([new, i, f, o]), act(cell))

    start = (_initial(h0, lengths, width, x), _initial(c0, lengths, width, x))
    return scan_rows(step, x, start, lengths, reverse=attrs["is_reverse"])


@fluid_op("gru", inputs="Input H0? Weight Bias? InputLengths?",
          outputs="BatchGate BatchResetHiddenPrev BatchHidden Hidden",
          attrs={"activation": "tanh", "gate_activation": "sigmoid", "is_reverse": False,
                 "origin_mode": False},
          gradient="Input H0 Weight Bias InputLengths -> Input H0 Weight Bias")  # fmt: skip
def gru(
    attrs: Attributes, x: Array, h0: Array | None, weight: Array, bias: Array | None,
    lengths: Array | None,
) -> Value:  # fmt: skip
    """GRU over projected rows: f32[rows,3*d], gates in the order u, r, c.

    The weight, f32[d,3*d], is two matrices in one buffer: f32[d,2*d] of the gates, then f32[d,d].
    """
    width = weight.shape[0]
    flat, cut = weight.reshape(-1), 2 * width * width
    of_gates, of_state = flat[:cut].reshape(width, 2 * width), flat[cut:].reshape(width, width)
    gate, candidate = _ACTIVATIONS[attrs["gate_activation"]], _ACTIVATIONS[attrs["activation"]]
    offset = jnp.zeros(3 * width, x.dtype) if bias is None else bias.reshape(-1)

    def step(hidden: Array, row: Array) -> tuple[Any, Any]:
        row = row + offset
        u, r = jnp.split(gate(row[: 2 * width] + hidden @ of_gates), 2)
        reset = r * hidden
        new = candidate(row[2 * width :] + reset @ of_state)
        made = u * hidden + (1 - u) * new if attrs["origin_mode"] else (1 - u) * hidden + u * new
        return made, (jnp.concatenate([u, r, new]), reset, made, made)

    start = _initial(h0, lengths, width, x)
    return scan_rows(step, x, start, lengths, reverse=attrs["is_reverse"])


_OF_ROWS = ("inputsLengths", "inputsRoom")  # read by the operator, not by its block
Named: TypeAlias = list[tuple[str, Array]]
Values: TypeAlias = dict[str, Array]
Step: TypeAlias = Callable[[Values, Values], tuple[Values, list[Array]]]


def _by_slot(op: Operator, values: Sequence[Array]) -> dict[str, Named]:
    """The block's names of its operator's inputs, with their values, by slot."""
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
    """The step function: from states and inputs to the next states and outputs."""
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
    """Values of enclosing variables that a block reads."""
    return dict(given.get("parameters", [])) | dict(given.get(BESIDE, []))


def _carried(op: Operator, given: Mapping[str, Named], around: Mapping[str, Array]) -> Values:
    """The initial states."""
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

    A sequence that has ended keeps its state, and further outputs of it are dropped.
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
    """Converts `[steps, sequences, ...]` to the rows of sequences; unused rows are zero."""
    owners = owners_of(rows, lengths)
    at = jnp.clip(owners, 0, lengths.shape[0] - 1)
    step = jnp.clip(jnp.arange(rows) - starts_of(lengths)[at], 0, made.shape[0] - 1)
    found = made[step, at]
    return jnp.where(_beside(owners < lengths.shape[0], found), found, jnp.zeros_like(found))


@fluid_op("fill_constant_per_sequence", inputs="X XLengths?",
          attrs={"shape": [], "value": 0.0, "dtype": "float32"})  # fmt: skip
def fill_constant_per_sequence(attrs: Attributes, _: Array, lengths: Array | None) -> Array:
    """Array filled with one value, a row per sequence: `[b, *shape]`."""
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
_READ = "inputs initial_states parameters"
describe("recurrent", inputs="inputs* initial_states*? parameters*? Beside*?", outputs="outputs*",
         attrs={**_NAMES, "reverse": False}, gradient=f"{_READ} {BESIDE} -> {_READ}")  # fmt: skip
describe("dynamic_recurrent",
         inputs="inputs* initial_states*? parameters*? inputsLengths? inputsRoom? Beside*?",
         outputs="outputs*", attrs=_NAMES,
         gradient=f"{_READ} {' '.join(_OF_ROWS)} {BESIDE} -> {_READ}")  # fmt: skip
define_block_gradient("recurrent")
define_block_gradient("dynamic_recurrent")
