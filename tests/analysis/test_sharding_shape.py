"""Operators that move axes: the cut axis is tracked, or the rows are gathered."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.analysis.on_devices import Family, check, every_way

BROADCASTS: Family = {
    "a scalar to rows": lambda s, b: jnp.full(b.x.shape, s.s),
    "one row to rows": lambda s, b: jnp.broadcast_to(s.v, b.x.shape),
    "rows to a new axis": lambda s, b: jnp.broadcast_to(b.x[:, None], (b.x.shape[0], 3, 6)),
    "rows to the second axis": lambda s, b: jnp.broadcast_to(b.x[None], (3, *b.x.shape)),
    "rows against rows": lambda s, b: jnp.broadcast_to(b.o[None], (b.x.shape[0], b.x.shape[0])),
    "rows against rows, the other way": lambda s, b: jnp.broadcast_to(
        b.o[:, None], (b.x.shape[0],) * 2
    ),
    "a scalar to rows against rows": lambda s, b: jnp.full((b.x.shape[0],) * 2, s.s),
    "a sum to features": lambda s, b: jnp.broadcast_to(b.x.sum(), (6,)) * s.v,
    "a sum to rows": lambda s, b: jnp.broadcast_to(b.x.sum(0), b.x.shape),
    "a sum to rows that are summed": lambda s, b: jnp.broadcast_to(b.x.sum(0), b.x.shape).sum(0),
    "a scalar to rows that are summed": lambda s, b: jnp.full(b.x.shape[0], s.s).sum(),
    "a size-one axis that grows": lambda s, b: lax.broadcast_in_dim(s.v[None], b.x.shape, (0, 1)),
    "twice the rows": lambda s, b: jnp.full((2 * b.x.shape[0], 3), s.s),
    "rows and features": lambda s, b: jnp.ones((b.x.shape[0] * 6,)).sum(),
    "half the rows": lambda s, b: jnp.ones((b.x.shape[0] // 2,)).sum(),
    "the number of rows": lambda s, b: (jnp.asarray(b.x.shape[0]), b.x.shape[0] // 2 + s.n),
    "count of rows": lambda s, b: jnp.arange(b.x.shape[0]),
    "count of rows as floats": lambda s, b: jnp.arange(b.x.shape[0], dtype=jnp.bfloat16) * 300,
    "count along features": lambda s, b: (
        lax.broadcasted_iota(jnp.int32, b.x.shape, 1) + b.k[:, None]
    ),
    "count along rows": lambda s, b: lax.broadcasted_iota(jnp.int32, b.x.shape, 0),
    "count along the second of two": lambda s, b: lax.broadcasted_iota(
        jnp.int32, (b.x.shape[0],) * 2, 1
    ),
    "an identity matrix": lambda s, b: jnp.eye(b.x.shape[0]) @ b.x,
    "count of twice the rows": lambda s, b: jnp.arange(2 * b.x.shape[0]),
    "count of all elements": lambda s, b: jnp.arange(b.x.size).reshape(b.x.shape),
    "one hot": lambda s, b: (b.k[:, None] == jnp.arange(6)).astype(jnp.float32) @ s.w,
    "one hot of as many classes as rows": lambda s, b: b.k[:, None] == jnp.arange(8),
    "a lower triangle": lambda s, b: jnp.tril(jnp.ones((b.x.shape[0],) * 2)) @ b.x,
}
RESHAPES: Family = {
    "merges the features": lambda s, b: b.t.reshape(b.t.shape[0], 24),
    "splits the features": lambda s, b: b.x.reshape(-1, 2, 3),
    "merges rows with features": lambda s, b: b.t.reshape(-1, 6),
    "merges everything": lambda s, b: b.t.reshape(-1),
    "splits what it merged": lambda s, b: jnp.tanh(b.t.reshape(-1, 6)).reshape(b.t.shape),
    "moves rows to another number": lambda s, b: b.t.reshape(-1, 4),
    "a multiple of rows first": lambda s, b: b.t.reshape(4 * b.t.shape[0], 6).reshape(4, -1, 6),
    "merges features with rows": lambda s, b: b.x.T.reshape(-1),
    "merges features with rows and sums": lambda s, b: b.x.T.reshape(-1).sum(),
    "splits features with rows": lambda s, b: b.x.T.reshape(2, 3, -1),
    "adds axes of one": lambda s, b: b.x[:, None, :, None],
    "adds an axis before": lambda s, b: b.x[None] * 2,
    "takes axes of one away": lambda s, b: b.x[None, :, None].squeeze((0, 2)),
    "a column": lambda s, b: b.o.reshape(-1, 1),
    "a sum": lambda s, b: b.t.sum(0).reshape(24),
    "a whole with rows in it": lambda s, b: jnp.sort(b.t, axis=0).reshape(-1, 6),
    "of one element": lambda s, b: b.x.sum().reshape(1, 1),
    "heads": lambda s, b: b.t.reshape(-1, 4, 2, 3).transpose(0, 2, 1, 3).reshape(-1, 2, 12),
    "heads before rows": lambda s, b: b.t.transpose(1, 0, 2).reshape(2, 2, -1, 6),
    "heads with rows": lambda s, b: b.t.transpose(1, 0, 2).reshape(-1, 6),
}
MOVES: Family = {
    "a transpose": lambda s, b: b.t.transpose(2, 0, 1),
    "a transposed sum": lambda s, b: b.t.sum(0).T,
    "features flipped": lambda s, b: b.x[:, ::-1],
    "rows flipped": lambda s, b: b.x[::-1],
    "a flipped sum": lambda s, b: b.x.sum(0)[::-1],
    "joined along features": lambda s, b: jnp.concatenate([b.x, b.y], 1),
    "joined with what every device has": lambda s, b: jnp.concatenate(
        [b.x, jnp.ones((b.x.shape[0], 1))], 1
    ),
    "joined along rows": lambda s, b: jnp.concatenate([b.x, b.y]),
    "joined with one row": lambda s, b: jnp.concatenate([b.x, s.v[None]]),
    "joined along rows, and parted": lambda s, b: jnp.split(
        jnp.tanh(jnp.concatenate([b.x, b.y])), 2
    ),
    "joined sums": lambda s, b: jnp.concatenate([b.x.sum(0), b.y.sum(0)]),
    "a sum joined with what every device has": lambda s, b: jnp.concatenate([b.x.sum(0), s.v]),
    "joined rows and transposed rows": lambda s, b: jnp.concatenate(
        [b.o[:, None] * b.o[None], (b.o[:, None] - b.o[None]).T], 1
    ),
    "stacked before rows": lambda s, b: jnp.stack([b.x, b.y]),
    "stacked behind rows": lambda s, b: jnp.stack([b.x, b.y], 1),
    "stacked last": lambda s, b: jnp.stack([b.x, s.v + b.y], -1),
    "stacked sums": lambda s, b: jnp.stack([b.x.sum(), b.y.sum(), s.s]),
    "stacked with what every device has": lambda s, b: jnp.stack([b.o, jnp.ones_like(b.o)]),
    "parted features": lambda s, b: jnp.split(b.x, 3, axis=1),
    "parted sums": lambda s, b: jnp.split(b.x.sum(0), 2),
    "padded features": lambda s, b: jnp.pad(b.x, ((0, 0), (1, 2))),
    "features padded with ones": lambda s, b: jnp.pad(b.x, ((0, 0), (1, 2)), constant_values=1),
    "features padded with a sum": lambda s, b: lax.pad(b.x, b.y.sum(), ((0, 0, 0), (1, 2, 0))),
    "features apart": lambda s, b: lax.pad(b.x, 0.0, ((0, 0, 0), (0, 0, 1))),
    "padded rows": lambda s, b: jnp.pad(b.x, ((1, 0), (0, 0))),
    "a padded sum": lambda s, b: jnp.pad(b.x.sum(0), (1, 2)),
    "a sum padded with ones": lambda s, b: jnp.pad(b.x.sum(0), (1, 2), constant_values=1),
    "a sum padded with a sum": lambda s, b: lax.pad(b.x.sum(0), b.y.sum(), ((1, 1, 0),)),
    "what every device has, padded with a sum": lambda s, b: lax.pad(s.v, b.y.sum(), ((1, 1, 0),)),
    "less rows": lambda s, b: lax.pad(b.x, 0.0, ((0, 0, 0), (-1, -2, 0))),
    "repeated features": lambda s, b: jnp.repeat(b.x, 2, axis=1),
    "repeated rows": lambda s, b: jnp.repeat(b.x, 2, axis=0),
    "tiled rows": lambda s, b: jnp.tile(b.x, (2, 1)),
    "rolled rows": lambda s, b: jnp.roll(b.x, 1, axis=0),
    "rolled features": lambda s, b: jnp.roll(b.x, 1, axis=1),
    "a spectrum": lambda s, b: jnp.abs(jnp.fft.rfft(b.x)),
    "a spectrum of rows": lambda s, b: jnp.abs(jnp.fft.fft(b.x, axis=0)),
    "a spectrum of a sum": lambda s, b: jnp.abs(jnp.fft.fft(b.x.sum(0))),
}
NUMBERED: Family = {
    "parted rows": lambda s, b: jnp.split(b.x, 2),
    "rows taken apart": lambda s, b: [row * 2 for row in b.x],
    "rows unstacked": lambda s, b: jnp.unstack(b.x),
    "features unstacked": lambda s, b: [*jnp.unstack(b.x, axis=1), *jnp.unstack(b.x.sum(0))],
    "a batch in parts": lambda s, b: b.x.reshape(4, 2, 6).sum((0, 2)),
    "a batch in other parts": lambda s, b: b.x.reshape(2, 4, 6).sum((0, 2)),
    "as wide as long": lambda s, b: jnp.ones((8, 8)) @ b.x + jnp.broadcast_to(s.s, (8, 1)),
    "as many features as rows": lambda s, b: b.x @ jnp.ones((6, 8)) * jnp.arange(8),
    "a constant with rows": lambda s, b: b.x * np.arange(8.0, dtype=np.float32)[:, None],
    "a constant with features": lambda s, b: b.x * np.arange(6.0, dtype=np.float32),
}


@pytest.mark.parametrize(("devices", "letter"), every_way((2, False), (4, True)))
@pytest.mark.parametrize(
    "family", [BROADCASTS, RESHAPES, MOVES], ids=["broadcasts", "reshapes", "moves"]
)
def test_axes_that_move(family: Family, devices: int, *, letter: bool) -> None:
    check(family, devices=devices, letter=letter)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_axes_that_only_a_number_can_name(devices: int) -> None:
    check(NUMBERED, devices=devices, letter=False)
