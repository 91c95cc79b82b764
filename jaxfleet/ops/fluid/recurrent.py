"""Recurrent operators over sequences: `lstm` and `gru` of fluid 1.8, with their layouts of weights.

Rows are scanned one after the other, and the state begins anew where a sequence does; so sequences
of any lengths cost as many steps as they have rows together.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.fluid.sequences import owners_of, starts_of
from jaxfleet.ops.registry import Array

Step: TypeAlias = Callable[[Any, Array], tuple[Any, Any]]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "identity": lambda x: x,
}


def scan_rows(
    step: Step, rows: Array, initial: Any, lengths: Array | None, *, reverse: bool = False
) -> Any:
    """Runs a step over the rows of each sequence.

    Args:
        step: takes the state and a row, returns the next state and what is kept of it.
        rows: f32[rows,width].
        initial: the state that each sequence begins with, f32[b,width] leaf by leaf.
        lengths: i32[b].
        reverse: begin each sequence at its end.
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
          gradient=Gradient("lstm_grad", ("Input", "H0", "C0", "Weight", "Bias", "InputLengths"),
                            ("Input", "H0", "C0", "Weight", "Bias")))  # fmt: skip
def lstm(
    attrs: Attributes, x: Array, h0: Array | None, c0: Array | None, weight: Array, bias: Array,
    lengths: Array | None,
) -> Value:  # fmt: skip
    """Runs an LSTM whose input has been multiplied: f32[rows,4*d], gates in the order c, i, f, o.

    The bias has four parts of `d`, and with peepholes three more, that the cell is multiplied by
    in the gates i, f and o (Gers and Schmidhuber, 2000).
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
          gradient=Gradient("gru_grad", ("Input", "H0", "Weight", "Bias", "InputLengths"),
                            ("Input", "H0", "Weight", "Bias")))  # fmt: skip
def gru(
    attrs: Attributes, x: Array, h0: Array | None, weight: Array, bias: Array | None,
    lengths: Array | None,
) -> Value:  # fmt: skip
    """Runs a GRU whose input has been multiplied: f32[rows,3*d], gates in the order u, r, c.

    The weight, f32[d,3*d], is two matrices in one memory: f32[d,2*d] of the gates, then f32[d,d].
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


for _type in ("lstm", "gru"):
    define_gradient(_type)
