"""Operators of beam search over sequences of two levels.

Beams are sequences of two levels: a source has prefixes, and a prefix has rows, its candidates.
Their number changes from step to step, but device arrays have a fixed size. So there are as many
rows as the maximum number of beams; rows after the last candidate are unused. The slots that end in
`Levels`, i32[sources+rows], are ours: the number of prefixes of each source, then the number of
rows of each prefix, zero-padded (`jaxfleet.fluid.framework.nested_sequences`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.ops.fluid.schema import Attributes, Value, fluid_op
from jaxfleet.ops.fluid.sequences import levels_apart, owners_of, rows_of_sources, starts_of
from jaxfleet.ops.registry import Array


@fluid_op("beam_search", inputs="pre_ids pre_scores ids? scores scoresLevels",
          outputs="selected_ids selected_scores parent_idx OutLevels",
          attrs={"level": 0, "beam_size": 1, "end_id": 0, "is_accumulated": True})  # fmt: skip
def beam_search(
    attrs: Attributes,
    pre_ids: Array,
    pre_scores: Array,
    ids: Array | None,
    scores: Array,
    levels: Array,
) -> Value:
    """Selects the `beam_size` best continuations of each source: `[rows,1]`, grouped by prefix.

    An ended prefix continues as itself, with its score. A source whose beams had all ended before
    gets no rows. Among equal scores the later prefix wins, as in fluid; within one prefix the
    earlier column, where fluid's choice varies.
    """
    rows, end = len(scores), attrs["end_id"]
    sizes = rows_of_sources(*levels_apart(levels, rows))
    source = owners_of(rows, sizes)
    before, wide = pre_scores.reshape(-1, 1), scores.reshape(rows, -1)
    wide = wide if attrs["is_accumulated"] else before + jnp.log(wide)
    width = wide.shape[1]
    column, row = jnp.arange(width), jnp.arange(rows)
    has_ended = pre_ids.reshape(-1, 1) == end
    tokens = jnp.where(has_ended, end, column if ids is None else ids.reshape(rows, -1))
    wide = jnp.where(has_ended, before, wide)
    is_candidate = (source < len(sizes))[:, None] & ((column == 0) | ~has_ended)

    def each(x: Array) -> Array:
        return jnp.broadcast_to(x, wide.shape).reshape(-1)

    keys = (column, -row[:, None], -wide, ~is_candidate, source[:, None])  # last key: primary
    order = jnp.lexsort([each(key) for key in keys])
    first = jnp.take(starts_of(sizes) * width, each(source[:, None])[order], mode="clip")
    rank = jnp.zeros(rows * width, jnp.int32).at[order].set(jnp.arange(rows * width) - first)
    is_selected = is_candidate & (rank.reshape(rows, width) < attrs["beam_size"])
    is_alive = (is_selected & ~(has_ended & (tokens == end))).any(axis=1)
    is_open = jax.ops.segment_max(is_alive.astype(jnp.int32), source, len(sizes)) > 0
    is_selected &= jnp.take(is_open, source, mode="clip")[:, None]

    chosen = jnp.lexsort((rank, each(row[:, None]), ~is_selected.reshape(-1)))[:rows]
    is_there = row < is_selected.sum()
    made = jnp.where(is_there, tokens.reshape(-1)[chosen], end).astype(pre_ids.dtype)
    best = jnp.where(is_there, wide.reshape(-1)[chosen], 0)
    parent = jnp.where(is_there, chosen // width, 0).astype(jnp.int32)
    counts = is_selected.sum(axis=1)
    after = jnp.concatenate([sizes, counts]).astype(jnp.int32)
    return made[:, None], best[:, None].astype(pre_scores.dtype), parent, after


@fluid_op("beam_search_decode", inputs="Ids Scores IdsLevels Length",
          outputs="SentenceIds SentenceScores OutLevels",
          attrs={"beam_size": 1, "end_id": 0})  # fmt: skip
def beam_search_decode(
    attrs: Attributes, ids: Array, scores: Array, levels: Array, length: Array
) -> Value:
    """Traces the beams of all steps back to whole sentences, for each source the best one first.

    Each source has `beam_size` sentences, of which those without a beam are empty. An end token
    is kept once. `[steps*rows]`, with the levels of sources and sentences.
    """
    (steps, rows), beams = ids.shape[:2], attrs["beam_size"]
    sources = levels.shape[1] - rows
    place = jnp.arange(beams)

    def back(
        state: tuple[Array, Array, Array], now: tuple[Array, Array, Array, Array]
    ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
        row, is_followed, total = state
        step, tokens, points, own = now
        prefixes, lengths = levels_apart(own, rows)
        sizes = rows_of_sources(prefixes, lengths)
        is_open = is_followed.any(axis=1, keepdims=True)
        begun = (place < sizes[:, None]) & (step < length.reshape(()))
        row = jnp.where(is_open, row, starts_of(sizes)[:, None] + place)
        row = jnp.clip(row, 0, rows - 1)
        is_there = jnp.where(is_open, is_followed, begun)
        token, score = tokens[row], points[row]
        is_kept = is_there & ((token != attrs["end_id"]) | ~is_followed)
        total = jnp.where(is_there & ~is_followed, score, total)
        parent = owners_of(rows, lengths)[row]
        return (parent, is_there, total), (token, score, is_kept)

    start = (
        jnp.zeros((sources, beams), jnp.int32),
        jnp.zeros((sources, beams), bool),
        jnp.full((sources, beams), -jnp.inf, scores.dtype),
    )
    each = (jnp.arange(steps), ids.reshape(steps, rows), scores.reshape(steps, rows), levels)
    (_, is_there, total), walked = lax.scan(back, start, each, reverse=True)
    order = jnp.lexsort((-total, ~is_there), axis=1)  # stable: the first of equal ones

    def by_sentence(x: Array) -> Array:
        sorted_ = jnp.take_along_axis(x, order[None], axis=2)
        return jnp.moveaxis(sorted_, 0, 2).reshape(sources * beams, steps)

    token, score, is_kept = map(by_sentence, walked)
    counts = is_kept.sum(axis=1)
    room = steps * rows
    at = starts_of(counts)[:, None] + jnp.cumsum(is_kept, axis=1) - 1
    at = jnp.where(is_kept, at, room)
    words = jnp.zeros(room, ids.dtype).at[at].set(token, mode="drop")
    points = jnp.zeros(room, scores.dtype).at[at].set(score, mode="drop")
    lengths = jnp.zeros(room, jnp.int32).at[: sources * beams].set(counts)
    return words, points, jnp.concatenate([jnp.full(sources, beams, jnp.int32), lengths])
