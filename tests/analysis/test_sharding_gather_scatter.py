"""Operators that gather and scatter elements by index, and those that sort."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.analysis.on_devices import Family, check, every_way

SLICES: Family = {
    "features": lambda s, b: b.x[:, 1:5:2],
    "a feature": lambda s, b: b.x[:, 2],
    "some rows": lambda s, b: b.x[1:5],
    "one row": lambda s, b: b.x[0],
    "the last row": lambda s, b: b.x[-1],
    "all but the first row": lambda s, b: b.x[1:],
    "every second row": lambda s, b: b.x[::2],
    "the first half": lambda s, b: b.x[: b.x.shape[0] // 2],
    "a sum": lambda s, b: b.x.sum(0)[1:4],
    "neighbours": lambda s, b: b.x[1:] - b.x[:-1],
    "features at a place that every device knows": lambda s, b: lax.dynamic_slice_in_dim(
        b.x, s.n, 2, 1
    ),
    "features at a place that is a sum": lambda s, b: lax.dynamic_slice_in_dim(
        b.x, b.m.sum() % 4, 2, 1
    ),
    "features beyond the end": lambda s, b: lax.dynamic_slice_in_dim(b.x, s.n * 7, 2, 1),
    "a row at a place that is a sum": lambda s, b: lax.dynamic_index_in_dim(b.x, b.m.sum() % 4, 0),
    "a sum at a place": lambda s, b: lax.dynamic_slice_in_dim(b.x.sum(0), s.n, 2, 0),
    "a sum at a place that is a sum": lambda s, b: lax.dynamic_slice_in_dim(
        b.x.sum(0), b.m.sum() % 4, 2, 0
    ),
    "features at a place of the first row": lambda s, b: lax.dynamic_slice_in_dim(
        s.v, b.k[0] % 4, 2, 0
    ),
    "features put in": lambda s, b: lax.dynamic_update_slice(b.x, b.y[:, :2], (0, s.n)),
    "a column put in": lambda s, b: b.x.at[:, s.n].set(b.o),
    "zeros put in": lambda s, b: lax.dynamic_update_slice(
        b.x, jnp.zeros((b.x.shape[0], 2)), (0, s.n)
    ),
    "rows put into what every device has": lambda s, b: lax.dynamic_update_slice(
        jnp.zeros((b.x.shape[0], 8)), b.x, (0, 1)
    ),
    "a sum put in": lambda s, b: lax.dynamic_update_slice(s.v, b.x.sum(0)[:2], (s.n,)),
    "put into a sum": lambda s, b: lax.dynamic_update_slice(b.x.sum(0), s.v[:2], (s.n,)),
    "a sum put into rows": lambda s, b: lax.dynamic_update_slice(
        b.x, jnp.broadcast_to(b.y.sum(0), b.x.shape)[:, :2], (0, s.n)
    ),
    "put at a place that is a sum": lambda s, b: lax.dynamic_update_slice(
        s.v, s.v[:2] * 2, (b.m.sum() % 4,)
    ),
}
LOOKUPS: Family = {
    "rows of a table": lambda s, b: s.table[b.k],
    "many rows of a table": lambda s, b: s.table[b.ids],
    "rows of a table, beyond its end": lambda s, b: s.table.at[b.k * 3].get(
        mode="fill", fill_value=-1
    ),
    "rows of a table, clipped": lambda s, b: s.table.at[b.k * 3].get(mode="clip"),
    "columns of a table": lambda s, b: s.w[:, b.k % 5],
    "elements of a table": lambda s, b: s.table[b.k, b.ids[:, 0] % 6],
    "an element of each row": lambda s, b: b.x[jnp.arange(b.x.shape[0]), b.k],
    "an element of each row, taken along": lambda s, b: jnp.take_along_axis(
        b.x, b.k[:, None], axis=1
    ),
    "steps of each row": lambda s, b: jnp.take_along_axis(b.t, b.ids[:, :, None] % 4, axis=1),
    "features that every device knows": lambda s, b: b.x[:, jnp.asarray([3, 1, 1])],
    "features at a place that every device knows": lambda s, b: b.x[:, jnp.stack([s.n, s.n - 1])],
    "rows that every device knows": lambda s, b: b.x[jnp.asarray([3, 1, 1])],
    "rows that rows name": lambda s, b: b.x[b.k],
    "rows that rows name, summed": lambda s, b: b.x[b.k].sum(),
    "a row that a sum names": lambda s, b: b.x[b.m.sum() % 4],
    "a sum's elements": lambda s, b: b.x.sum(0)[jnp.asarray([2, 0])],
    "a sum's elements that rows name": lambda s, b: b.x.sum(0)[b.k],
    "slices of a table, one for each row": lambda s, b: jax.vmap(
        lambda k: lax.dynamic_slice_in_dim(s.v, k, 2)
    )(b.k % 4),
    "slices of rows, one for each": lambda s, b: jax.vmap(
        lambda x, k: lax.dynamic_slice_in_dim(x, k, 2)
    )(b.x, b.k % 4),
    "slices of rows, one place for all": lambda s, b: jax.vmap(
        lambda x: lax.dynamic_slice_in_dim(x, s.n, 2)
    )(b.x),
    "slices of a sum, one for each row": lambda s, b: jax.vmap(
        lambda k: lax.dynamic_slice_in_dim(b.x.sum(0), k, 2)
    )(b.k % 4),
    "rows behind features": lambda s, b: jax.vmap(lambda x, k: x[k], (1, 0))(b.x.T, b.k),
    "rows behind features, out there too": lambda s, b: jax.vmap(lambda x, k: x[k], (1, 1), 1)(
        b.x.T, b.ids.T % 6
    ),
    "coordinates in rows": lambda s, b: lax.gather(
        s.table,
        b.ids[:, :2].T[:, :, None][:, :, 0].T % 6,
        lax.GatherDimensionNumbers((), (0, 1), (0, 1)),
        (1, 1),
    ),
    "the largest's row": lambda s, b: b.y[b.x[:, 0].argmax()],
    "gradient of rows of a table": lambda s, b: jax.grad(lambda t: (t[b.k] ** 2).sum())(s.table),
    "gradient of many rows of a table": lambda s, b: jax.grad(lambda t: (t[b.ids] ** 2).mean())(
        s.table
    ),
    "gradient of an element of each row": lambda s, b: jax.grad(
        lambda x: (x[jnp.arange(b.x.shape[0]), b.k] ** 2).sum()
    )(b.x),
    "gradient of steps of each row": lambda s, b: jax.grad(
        lambda t: (jnp.take_along_axis(t, b.ids[:, :, None] % 4, axis=1) ** 2).sum()
    )(b.t),
    "gradient of rows that rows name": lambda s, b: jax.grad(lambda x: (x[b.k] ** 2).sum())(b.x),
    "gradient of slices, one for each row": lambda s, b: jax.grad(
        lambda x: (jax.vmap(lambda x, k: lax.dynamic_slice_in_dim(x, k, 2))(x, b.k % 4) ** 2).sum()
    )(b.x),
    "gradient of a slice at a place": lambda s, b: jax.grad(
        lambda x: (lax.dynamic_slice_in_dim(x, s.n, 2, 1) ** 2).sum()
    )(b.x),
    "gradient of features": lambda s, b: jax.grad(
        lambda x: (x[:, jnp.asarray([3, 1, 1])] ** 2).sum()
    )(b.x),
}
WRITES: Family = {
    "rows added to a table": lambda s, b: s.table.at[b.k].add(b.x),
    "many rows added to a table": lambda s, b: s.table.at[b.ids].add(b.x[:, None]),
    "a number added to a table": lambda s, b: s.table.at[b.k].add(1.0),
    "a sum added to a table": lambda s, b: s.table.at[jnp.asarray([1, 3])].add(b.x.sum(0)),
    "added to a sum": lambda s, b: (b.x.T @ b.y).at[jnp.asarray([1, 3])].add(s.v),
    "rows added to a sum": lambda s, b: (b.x.T @ b.y).at[b.k].add(b.x),
    "what is beyond the end, dropped": lambda s, b: s.table.at[b.k * 2].add(b.x, mode="drop"),
    "a histogram": lambda s, b: jnp.zeros(6, jnp.int32).at[b.k].add(1),
    "a histogram of floats": lambda s, b: jnp.zeros(6).at[b.k].add(b.o),
    "a segment sum": lambda s, b: jax.ops.segment_sum(b.x, b.k, num_segments=6),
    "a segment maximum": lambda s, b: jax.ops.segment_max(b.x, b.k, num_segments=6),
    "a bincount": lambda s, b: jnp.bincount(b.k, length=6),
    "an element of each row added": lambda s, b: b.x.at[jnp.arange(b.x.shape[0]), b.k].add(b.o),
    "an element of each row set": lambda s, b: b.x.at[jnp.arange(b.x.shape[0]), b.k].set(b.o),
    "features set": lambda s, b: b.x.at[:, jnp.asarray([1, 3])].set(0.0),
    "features set to rows": lambda s, b: b.x.at[:, jnp.asarray([1, 3])].set(b.y[:, :2]),
    "features multiplied": lambda s, b: b.x.at[:, 1].mul(b.o),
    "features bounded": lambda s, b: (b.x.at[:, 1].min(0.0), b.x.at[:, 1].max(b.o)),
    "a row set": lambda s, b: b.x.at[1].set(s.v),
    "rows set": lambda s, b: b.x.at[1:3].set(b.y[1:3]),
    "the first row added to": lambda s, b: b.x.at[0].add(1.0),
    "rows moved": lambda s, b: (
        jnp.zeros_like(b.x).at[(b.k + jnp.arange(b.x.shape[0])) % b.x.shape[0]].add(b.x)
    ),
    "rows set in a table": lambda s, b: s.table.at[b.k].set(jnp.where(True, s.table[b.k] * 2, b.x)),
    "rows that bound a table": lambda s, b: (s.table.at[b.k].max(b.x), s.table.at[b.k].min(b.x)),
    "a sum set": lambda s, b: s.v.at[1].set(b.x.sum()),
    "set in a sum": lambda s, b: b.x.sum(0).at[1].set(s.s),
    "a sum multiplied": lambda s, b: b.x.sum(0).at[1].mul(s.s),
    "at a place that is a sum": lambda s, b: s.v.at[b.m.sum() % 4].add(1.0),
    "each row's slice put in": lambda s, b: jax.vmap(
        lambda x, k: lax.dynamic_update_slice_in_dim(x, x[:2] * 2, k, 0)
    )(b.x, b.k % 4),
    "each row's element added": lambda s, b: jax.vmap(lambda x, k: x.at[k].add(1.0))(b.x, b.k),
    "each row's elements in a table of its own": lambda s, b: jax.vmap(
        lambda k: s.v.at[k].add(1.0)
    )(b.k),
    "counts for each row": lambda s, b: jax.vmap(lambda i: jnp.zeros(7, jnp.int32).at[i].add(1))(
        b.ids
    ),
    "rows behind features": lambda s, b: jax.vmap(lambda x, k: x.at[k].add(1.0), (1, 0), 1)(
        b.x.T, b.k
    ),
}
ORDERS: Family = {
    "features sorted": lambda s, b: (jnp.sort(b.x), jnp.argsort(b.x)),
    "rows sorted": lambda s, b: (jnp.sort(b.x, axis=0), jnp.argsort(b.x, axis=0)),
    "rows sorted, with ties": lambda s, b: jnp.argsort(b.k),
    "rows sorted by a key": lambda s, b: lax.sort((b.k, b.o), num_keys=1),
    "a sorted sum": lambda s, b: jnp.sort(b.x.sum(0)),
    "rows and what every device has, sorted": lambda s, b: lax.sort(
        (b.x, jnp.broadcast_to(s.v, b.x.shape)), dimension=1, num_keys=1
    ),
    "the best features": lambda s, b: lax.top_k(b.x, 2),
    "the best of a sum": lambda s, b: lax.top_k(b.x.sum(0), 3),
    "nearly the best steps": lambda s, b: lax.approx_max_k(b.t, 2, reduction_dimension=1),
    "sums along features": lambda s, b: (jnp.cumsum(b.x, axis=1), lax.cumsum(b.t, 1, reverse=True)),
    "sums along rows": lambda s, b: (jnp.cumsum(b.x, axis=0), lax.cumsum(b.o, reverse=True)),
    "sums along a sum": lambda s, b: jnp.cumsum(b.x.sum(0)),
    "products along features": lambda s, b: jnp.cumprod(b.x, axis=1),
    "maxima along features": lambda s, b: (
        lax.cummax(b.x, 1),
        lax.cummin(b.x, 1),
        lax.cumlogsumexp(b.x, 1),
    ),
    "maxima along rows": lambda s, b: lax.cummax(b.x, 0),
    "maxima along a sum": lambda s, b: lax.cummax(b.x.sum(0), 0),
    "a rank": lambda s, b: jnp.argsort(jnp.argsort(b.o)),
    "a quantile": lambda s, b: jnp.quantile(b.x, 0.3, axis=0),
    "an associative scan": lambda s, b: lax.associative_scan(jnp.add, b.x, axis=1),
}
NUMBERED: Family = {
    "rows at a place that every device knows": lambda s, b: lax.dynamic_slice_in_dim(
        b.x, s.n, 2, 0
    ),
    "rows put in": lambda s, b: lax.dynamic_update_slice(b.x, s.table[:2], (s.n, 0)),
    "the best rows": lambda s, b: lax.top_k(b.o, 3),
    "nearly the best rows": lambda s, b: lax.approx_max_k(b.x.T, 3),
    "coordinates across rows": lambda s, b: lax.gather(
        jnp.arange(256.0).reshape((2,) * 8),
        b.k[None] % 2,
        lax.GatherDimensionNumbers((), tuple(range(8)), tuple(range(8))),
        (1,) * 8,
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "letter"), every_way((4, True), (2, False)))
@pytest.mark.parametrize(
    "family", [SLICES, LOOKUPS, WRITES, ORDERS], ids=["slices", "look-ups", "writes", "orders"]
)
def test_by_index(family: Family, devices: int, *, letter: bool) -> None:
    check(family, devices=devices, letter=letter)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_by_index_among_a_number_of_rows(devices: int) -> None:
    check(NUMBERED, devices=devices, letter=False)
