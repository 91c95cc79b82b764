"""Linear-chain conditional random fields over sequences (Lafferty et al., 2001), as fluid has them.

The transition weights are f32[tags+2,tags]: row 0 scores the first tag of a sequence, row 1 the
last, and row `2 + i` what follows tag `i`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.gradients import define_gradient
from jaxfleet.ops.fluid.recurrent import scan_rows
from jaxfleet.ops.fluid.schema import Attributes, Gradient, Value, fluid_op
from jaxfleet.ops.fluid.sequences import owners_of, starts_of
from jaxfleet.ops.registry import Array


@fluid_op("linear_chain_crf", inputs="Emission Transition Label EmissionLengths?",
          outputs="Alpha EmissionExps TransitionExps LogLikelihood",
          gradient=Gradient("linear_chain_crf_grad",
                            ("Emission", "Transition", "Label", "EmissionLengths"),
                            ("Emission", "Transition")))  # fmt: skip
def linear_chain_crf(
    _: Attributes, emission: Array, transition: Array, label: Array, lengths: Array | None
) -> Value:
    """Takes minus the log-likelihood of each sequence's tags: f32[b,1], 0 for an empty one."""
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
    """Returns the log of the summed scores of all paths to each tag of each row."""
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
    """Finds the best tags of each sequence: i64[rows,1]; beside labels, 1 where they are right."""
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


define_gradient("linear_chain_crf")
