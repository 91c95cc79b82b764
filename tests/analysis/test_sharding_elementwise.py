"""Elementwise operators, on rows, on partial sums and on replicated values."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.analysis.on_devices import Family, check, every_way

ROWS: Family = {
    "rows plus rows": lambda s, b: b.x + b.y,
    "rows plus what every device has": lambda s, b: b.x + s.v,
    "rows plus a scalar": lambda s, b: b.x * s.s - 1,
    "rows beside one row for all": lambda s, b: lax.mul(
        b.x, jnp.exp(s.v)[None, :] * jnp.ones_like(b.x)
    ),
    "a column beside rows": lambda s, b: b.x - b.x.max(axis=1, keepdims=True),
    "one row for all, without a broadcast": lambda s, b: lax.add_p.bind(b.o[None, :], s.v[:, None]),
    "a comparison": lambda s, b: b.x > s.s,
    "a selection by rows": lambda s, b: jnp.where(b.m[:, None], b.x, s.v),
    "a clamp of rows": lambda s, b: lax.clamp(jnp.float32(-0.5), b.x, s.s),
    "a clamp by rows": lambda s, b: lax.clamp(b.y - 1, b.x, b.y + 1),
    "integer division": lambda s, b: b.k // s.n,
    "remainder": lambda s, b: b.k % s.n,
    "transcendental functions": lambda s, b: jnp.tanh(b.x) + lax.erf(b.y) + jnp.exp2(b.x),
    "bits": lambda s, b: lax.bitcast_convert_type(b.x, jnp.int32) & 7,
    "bytes": lambda s, b: lax.bitcast_convert_type(b.x, jnp.uint8),
    "powers": lambda s, b: (jnp.abs(b.x) ** s.s, b.x**3),
    "rows along the second axis": lambda s, b: b.x.T * s.v[:, None],
    "rows along two axes": lambda s, b: b.o[:, None] - b.o[None, :],
    "a complex number": lambda s, b: lax.complex(b.x, b.y).conj(),
    "gamma": lambda s, b: lax.igamma(jnp.abs(b.x) + 0.1, jnp.abs(b.y) + 0.1),
}
SUMS: Family = {
    "a sum": lambda s, b: b.x.sum(0),
    "a sum and its square": lambda s, b: (b.x.sum(), b.x.sum() ** 2),
    "sums of sums": lambda s, b: b.x.sum(0) + b.y.sum(0) - b.x.mean(0),
    "a sum plus a literal": lambda s, b: b.x.sum() + 1.0,
    "a sum less what every device has": lambda s, b: (b.x.sum(0) - s.v, s.v - b.x.sum(0)),
    "a sum times what every device has": lambda s, b: b.x.sum(0) * s.v,
    "a product of sums": lambda s, b: b.x.sum(0) * b.y.sum(0),
    "a sum times itself": lambda s, b: (lambda t: t * t)(b.x.sum(0)),
    "a sum by what every device has": lambda s, b: b.x.sum(0) / s.s,
    "what every device has by a sum": lambda s, b: s.s / b.x.sum(0),
    "a sum by a sum": lambda s, b: b.x.sum(0) / b.m.sum(),
    "an integer sum divided": lambda s, b: b.k.sum() // s.n,
    "an integer sum divided exactly": lambda s, b: lax.div(b.k.sum(), jnp.int32(2)),
    "an integer sum's remainder": lambda s, b: b.k.sum() % s.n,
    "an integer sum times an integer": lambda s, b: b.k.sum() * s.n - 2,
    "a narrowed sum": lambda s, b: b.o.sum().astype(jnp.int32),
    "a narrowed float sum": lambda s, b: (b.o.sum() * 100.125).astype(jnp.bfloat16),
    "a widened sum": lambda s, b: (
        b.o.astype(jnp.bfloat16).sum(dtype=jnp.bfloat16).astype(jnp.float32)
    ),
    "an integer sum as a float": lambda s, b: b.k.sum().astype(jnp.float32) * 0.5,
    "a sum as a boolean": lambda s, b: b.m.sum().astype(bool),
    "an integer sum as bytes": lambda s, b: (b.k.sum() * 1000).astype(jnp.int8),
    "the larger sum": lambda s, b: jnp.maximum(b.x.sum(0), b.y.sum(0)),
    "the smaller of a sum": lambda s, b: jnp.minimum(b.x.sum(0), 0.0),
    "a clamped sum": lambda s, b: jnp.clip(b.x.sum(0), -1, 1),
    "a selected sum": lambda s, b: jnp.where(s.v > 0, b.x.sum(0), b.y.sum(0)),
    "a sum or zero": lambda s, b: jnp.where(s.v > 0, b.x.sum(0), 0),
    "a sum or one": lambda s, b: jnp.where(s.v > 0, b.x.sum(0), 1),
    "chosen by a sum": lambda s, b: jnp.where(b.x.sum(0) > 0, s.v, b.x.sum(0)),
    "chosen by an integer sum": lambda s, b: lax.select_n(b.m.sum() % 3, s.s, b.x.sum(), s.s * 2),
    "an absolute sum": lambda s, b: jnp.abs(b.x.sum(0)) + lax.neg(b.y.sum(0)),
    "parts of a complex sum": lambda s, b: (lambda c: (c.real, c.imag, c.conj()))(
        lax.complex(b.x, b.y).sum(0)
    ),
    "a sum beside rows": lambda s, b: b.x - b.x.mean(0),
    "a sum used twice": lambda s, b: (lambda t: (t * 2, jnp.exp(t), t + s.s))(b.x.mean()),
    "a sum as a sum and complete": lambda s, b: (lambda t: (t + b.y.sum(0)) * jnp.tanh(t))(
        b.x.sum(0)
    ),
    "a square root of a mean and an epsilon": lambda s, b: b.x * lax.rsqrt((b.x**2).mean(0) + 1e-5),
    "minus nothing": lambda s, b: b.x.sum(0) - jnp.zeros(6),
    "nothing minus": lambda s, b: -0.0 - b.x.sum(0),
    "nothing times": lambda s, b: b.x.sum(0) * jnp.zeros(6),
    "nothing divided by nothing": lambda s, b: (b.x * 0).sum(0) / jnp.zeros(6),
    "infinity times": lambda s, b: jnp.abs(b.x).sum(0) * jnp.inf,
    "xor of a sum": lambda s, b: b.k.sum() ^ s.n,
    "a shifted sum": lambda s, b: b.k.sum() << 1,
    "a reduced precision": lambda s, b: lax.reduce_precision(b.x.sum(0), 8, 7),
    "through a barrier": lambda s, b: lax.optimization_barrier((b.x.sum(0), b.x, s.v)),
    "an overflow": lambda s, b: (b.k * 1_000_000_007).sum(),
    "a key": lambda s, b: jax.random.fold_in(s.keys, b.k[0] + b.k.sum()),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "letter"), every_way((2, True), (4, False)))
@pytest.mark.parametrize("family", [ROWS, SUMS], ids=["rows", "sums"])
def test_element_by_element(family: Family, devices: int, *, letter: bool) -> None:
    check(family, devices=devices, letter=letter)
