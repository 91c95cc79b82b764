"""Operators that compare two sequences of unequal lengths: CTC's loss, and edit distances.

Sequences come as rows with lengths, or padded with a length each. `...Lengths` and `...Room` are
slots of ours (`jaxfleet.fluid.ragged`): of sequences that come as rows.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.fluid.sequence_shapes import padded
from jaxfleet.ops.registry import Array

_NEVER = -1e30  # the log of a probability that is 0; its sums are finite, and so are gradients


def _of_rows(x: Array, lengths: Array | None, room: Array | None) -> tuple[Array, Array]:
    """Returns sequences of rows as an array `[b,most,...]`, and their lengths."""
    made = padded(x, lengths, len(x) if room is None else len(room))
    assert lengths is not None
    return made, lengths


def _given(
    logits: Array, label: Array, own: Array | None, others: Array | None, *aside: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Returns scores f32[b,time,classes] and labels i32[b,most], each with lengths i32[b]."""
    if own is not None and others is not None:
        times, counts = (n.reshape(-1).astype(jnp.int32) for n in (own, others))
        return jnp.moveaxis(logits, 0, 1), times, label.reshape(len(times), -1), counts
    scores, times = _of_rows(logits, *aside[:2])
    tags, counts = _of_rows(label.reshape(-1), *aside[2:])
    return scores, times, tags, counts


def _ctc(blank: int, scores: Array, times: Array, tags: Array, counts: Array) -> Array:
    """Returns minus the log of the probability of each label (Graves and others, 2006): f32[b].

    A label for which there is too little time costs 0, as in fluid (its library, warp-ctc).
    """
    count, most = tags.shape
    logs = jax.nn.log_softmax(scores, axis=2)
    places = jnp.arange(2 * most + 1)
    # Blanks stand between, before and behind the label's tags.
    state = jnp.full((count, 2 * most + 1), blank).at[:, 1::2].set(tags)
    before = jnp.roll(state, 2, axis=1)
    may_skip = (places % 2 == 1) & (places > 1) & (state != before)

    def step(alpha: Array, now: tuple[Array, Array]) -> tuple[Array, None]:
        row, at = now
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=_NEVER)[:, :-1]
        two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=_NEVER)[:, :-2]
        come = jnp.logaddexp(alpha, one)
        come = jnp.where(may_skip, jnp.logaddexp(come, two), come)
        come = jnp.where(at == 0, jnp.where(places < 2, 0.0, _NEVER), come)
        made = come + jnp.take_along_axis(row, state, axis=1)
        return jnp.where((at < times)[:, None], made, alpha), None

    start = jnp.full(state.shape, _NEVER, logs.dtype)
    rows = (jnp.moveaxis(logs, 1, 0), jnp.arange(logs.shape[1]))
    alpha, _ = lax.scan(step, start, rows)
    last = jnp.take_along_axis(alpha, 2 * counts[:, None], axis=1)[:, 0]
    other = jnp.take_along_axis(alpha, jnp.maximum(2 * counts[:, None] - 1, 0), axis=1)[:, 0]
    total = jnp.where(counts > 0, jnp.logaddexp(last, other), last)
    is_again = (tags[:, 1:] == tags[:, :-1]) & (jnp.arange(1, most) < counts[:, None])
    has_time = counts + is_again.sum(axis=1) <= times
    return jnp.where(has_time & (times > 0), -total, 0.0)


def _ctc_back(
    attrs: Attributes, reads: Mapping[str, Value], grads: Mapping[str, Value]
) -> Mapping[str, Value]:
    names = ("Logits", "Label", "LogitsLength", "LabelLength", "LogitsLengths", "LogitsRoom",
             "LabelLengths", "LabelRoom")  # fmt: skip
    logits, *rest = (reads[name] for name in names)

    def cost(logits: Array) -> Array:
        return _ctc(attrs["blank"], *_given(logits, *rest))

    slope = grads["Loss"].reshape(-1)
    if attrs["norm_by_times"] and (times := reads["LogitsLengths"]) is not None:
        slope = slope / jnp.maximum(times, 1)  # of rows alone, as in fluid
    _, pull = jax.vjp(cost, logits)
    return {"Logits": pull(slope)[0]}


@fluid_op("warpctc",
          inputs="Logits Label LogitsLength? LabelLength? LogitsLengths? LogitsRoom? LabelLengths?"
                 " LabelRoom?",
          outputs="WarpCTCGrad Loss", attrs={"blank": 0, "norm_by_times": False},
          gradient=Gradient("warpctc_grad",
                            ("Logits", "Label", "LogitsLength", "LabelLength", "LogitsLengths",
                             "LogitsRoom", "LabelLengths", "LabelRoom"),
                            ("Logits",), _ctc_back))  # fmt: skip
def warpctc(attrs: Attributes, logits: Array, label: Array, *more: Array | None) -> Value:
    """Takes CTC's loss of scores that no softmax has seen: f32[b,1].

    `WarpCTCGrad`, the gradient of each loss, is `[time,b,classes]`, as in fluid.
    """
    scores, *rest = _given(logits, label, *more)

    def cost(scores: Array) -> Array:
        return _ctc(attrs["blank"], scores, *rest)

    made, pull = jax.vjp(cost, scores)
    (slope,) = pull(jnp.ones_like(made))
    return jnp.moveaxis(slope, 1, 0), made[:, None]


@fluid_op("edit_distance",
          inputs="Hyps Refs HypsLength? RefsLength? HypsLengths? HypsRoom? RefsLengths? RefsRoom?",
          outputs="Out SequenceNum", attrs={"normalized": False})  # fmt: skip
def edit_distance(
    attrs: Attributes, hyps: Array, refs: Array, own: Array | None, others: Array | None,
    *aside: Array | None,
) -> Value:  # fmt: skip
    """Counts what turns one sequence into another (Levenshtein): f32[b,1], and how many there are.

    A reference that is empty has no distance in lengths of it: NaN or infinity.
    """
    if own is not None and others is not None:
        lengths, counts = (n.reshape(-1).astype(jnp.int32) for n in (own, others))
        words, wanted = (x.reshape(len(lengths), -1) for x in (hyps, refs))
    else:
        words, lengths = _of_rows(hyps.reshape(-1), *aside[:2])
        wanted, counts = _of_rows(refs.reshape(-1), *aside[2:])
    places = jnp.arange(wanted.shape[1] + 1)

    def step(row: Array, now: tuple[Array, Array]) -> tuple[Array, None]:
        word, at = now
        changed = row[:, :-1] + (wanted != word[:, None])
        made = row.at[:, 0].set(at + 1).at[:, 1:].set(jnp.minimum(changed, row[:, 1:] + 1))
        # What is put in costs one for each place: the least of what stands before, and the way.
        made = lax.cummin(made - places, axis=1) + places
        return jnp.where((at < lengths)[:, None], made, row), None

    start = jnp.broadcast_to(places, (len(words), len(places)))
    row, _ = lax.scan(step, start, (words.T, jnp.arange(words.shape[1])))
    made = jnp.take_along_axis(row, counts[:, None], axis=1).astype(jnp.float32)
    made = made / counts[:, None] if attrs["normalized"] else made
    return made, jnp.full(1, len(words), jnp.int32)


define_gradient("warpctc")
