"""Linear-chain CRF (Lafferty et al., 2001), CTC loss, and edit distance over sequences.

The transition weights of the CRF are f32[tags+2,tags]: row 0 scores the first tag of a sequence,
row 1 the last, and row `2 + i` the successor of tag `i`.

Sequences are rows with lengths, or padded with a length each. The slots `...Lengths` and `...Room`
(`jaxfleet.fluid.framework.sequence_lengths`) are for rows with lengths.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.ops.fluid.recurrent import scan_rows
from jaxfleet.ops.fluid.schema import Attributes, BySlot, Gradient, Value, fluid_op
from jaxfleet.ops.fluid.sequences import owners_of, padded, starts_of
from jaxfleet.ops.registry import Array


@fluid_op("linear_chain_crf", inputs="Emission Transition Label EmissionLengths?",
          outputs="Alpha EmissionExps TransitionExps LogLikelihood",
          gradient="Emission Transition Label EmissionLengths -> Emission Transition")  # fmt: skip
def linear_chain_crf(
    _: Attributes, emission: Array, transition: Array, label: Array, lengths: Array | None
) -> Value:
    """Negative log-likelihood of each sequence's tags: f32[b,1], 0 for an empty one."""
    first, last, between = transition[0], transition[1], transition[2:]
    alpha = _forward(emission, first, between, lengths)
    assert lengths is not None
    ends = starts_of(lengths) + jnp.maximum(lengths, 1) - 1
    norm = jax.nn.logsumexp(alpha[ends] + last, axis=1)

    tags = label.reshape(-1)
    owners = owners_of(emission.shape[0], lengths)
    before = jnp.roll(tags, 1)
    is_first = jnp.roll(owners, 1).at[0].set(-1) != owners
    step = jnp.where(is_first, first[tags], between[before, tags])
    score = step + jnp.take_along_axis(emission, tags[:, None], axis=1)[:, 0]
    total = jax.ops.segment_sum(score, owners, lengths.shape[0]) + last[tags[ends]]
    cost = jnp.where(lengths > 0, norm - total, 0)[:, None]
    return (
        jnp.exp(alpha - norm[jnp.clip(owners, 0, lengths.shape[0] - 1), None]),
        jnp.exp(emission),
        jnp.exp(transition),
        cost,
    )


def _forward(emission: Array, first: Array, between: Array, lengths: Array | None) -> Array:
    """Log of the summed scores of all paths to each tag of each row."""
    count = 1 if lengths is None else lengths.shape[0]
    start = (jnp.zeros((count, emission.shape[1]), emission.dtype), jnp.ones((count, 1)))

    def step(state: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], Array]:
        alpha, is_first = state
        come = jax.nn.logsumexp(alpha[:, None] + between, axis=0)
        made = jnp.where(is_first > 0, first, come) + row
        return (made, jnp.zeros_like(is_first)), made

    made: Array = scan_rows(step, emission, start, lengths)
    return made


@fluid_op(
    "crf_decoding", inputs="Emission Transition Label? EmissionLengths?", outputs="ViterbiPath"
)
def crf_decoding(
    _: Attributes, emission: Array, transition: Array, label: Array | None, lengths: Array | None
) -> Array:
    """The best tags of each sequence: i64[rows,1]; with labels, 1 where they are equal."""
    first, last, between = transition[0], transition[1], transition[2:]
    rows, tags = emission.shape
    owners = owners_of(rows, lengths)
    assert lengths is not None
    ends = starts_of(lengths) + lengths - 1
    at = jnp.clip(owners, 0, lengths.shape[0] - 1)
    is_last = jnp.arange(rows) == ends[at]
    start = (jnp.zeros((lengths.shape[0], tags)), jnp.ones((lengths.shape[0], 1)))

    def forward(state: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], Array]:
        best, is_first = state
        ways = best[:, None] + between
        made = jnp.where(is_first > 0, first, ways.max(axis=0)) + row
        return (made, jnp.zeros_like(is_first)), (made, ways.argmax(axis=0))

    score, come_from = scan_rows(forward, emission, start, lengths)

    def backward(follows: Array, now: Any) -> tuple[Array, Array]:
        best, before, ends_here = now
        tag = jnp.where(ends_here, (best + last).argmax(), follows)
        return before[tag], tag

    first_tag: Any = jnp.zeros((), come_from.dtype)
    _, path = jax.lax.scan(backward, first_tag, (score, come_from, is_last), reverse=True)
    if label is not None:
        path = path == label.reshape(-1)
    return path.astype(jnp.int32)[:, None]


_NEVER = -1e30  # log of probability 0, finite in sums and gradients


def _of_rows(x: Array, lengths: Array | None, room: Array | None) -> tuple[Array, Array]:
    """Sequences of rows as an array `[b,most,...]`, and their lengths."""
    made = padded(x, lengths, len(x) if room is None else len(room))
    assert lengths is not None
    return made, lengths


def _given(
    logits: Array, label: Array, own: Array | None, others: Array | None, *aside: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Scores f32[b,time,classes] and labels i32[b,most], each with lengths i32[b]."""
    if own is not None and others is not None:
        times, counts = (n.reshape(-1).astype(jnp.int32) for n in (own, others))
        return jnp.moveaxis(logits, 0, 1), times, label.reshape(len(times), -1), counts
    scores, times = _of_rows(logits, *aside[:2])
    tags, counts = _of_rows(label.reshape(-1), *aside[2:])
    return scores, times, tags, counts


def _ctc(blank: int, scores: Array, times: Array, tags: Array, counts: Array) -> Array:
    """Negative log-probability of each label (Graves et al., 2006): f32[b].

    A label that is too long for its time costs 0, as in fluid (its library, warp-ctc).
    """
    count, most = tags.shape
    logs = jax.nn.log_softmax(scores, axis=2)
    places = jnp.arange(2 * most + 1)
    # Blanks are between, before and after the label's tags.
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


def _ctc_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    names = ("Logits", "Label", "LogitsLength", "LabelLength", "LogitsLengths", "LogitsRoom",
             "LabelLengths", "LabelRoom")  # fmt: skip
    logits, *rest = (reads[name] for name in names)

    def cost(logits: Array) -> Array:
        return _ctc(attrs["blank"], *_given(logits, *rest))

    slope = grads["Loss"].reshape(-1)
    if attrs["norm_by_times"] and (times := reads["LogitsLengths"]) is not None:
        slope = slope / jnp.maximum(times, 1)  # only for rows, as in fluid
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
    """CTC loss of unnormalized scores: f32[b,1].

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
    """Edit distance (Levenshtein) of sequences: f32[b,1], and the number of sequences.

    Normalized by an empty reference it is NaN or infinite.
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
        # Insertions cost one per position: a running minimum of cost minus position.
        made = lax.cummin(made - places, axis=1) + places
        return jnp.where((at < lengths)[:, None], made, row), None

    start = jnp.broadcast_to(places, (len(words), len(places)))
    row, _ = lax.scan(step, start, (words.T, jnp.arange(words.shape[1])))
    made = jnp.take_along_axis(row, counts[:, None], axis=1).astype(jnp.float32)
    made = made / counts[:, None] if attrs["normalized"] else made
    return made, jnp.full(1, len(words), jnp.int32)
