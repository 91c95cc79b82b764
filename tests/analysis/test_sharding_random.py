"""Random numbers: those of one device, on any number of devices."""

import jax
import jax.numpy as jnp
import pytest
from jax import random

from tests.analysis.on_devices import Family, check, every_way

DRAWS: Family = {
    "a number for each row": lambda s, b: random.uniform(s.keys, b.o.shape),
    "a mask": lambda s, b: jnp.where(random.bernoulli(s.keys, 0.5, b.x.shape), b.x, 0),
    "noise": lambda s, b: b.x + random.normal(s.keys, b.x.shape),
    "bits": lambda s, b: random.bits(s.keys, b.x.shape),
    "bytes": lambda s, b: (
        random.bits(s.keys, b.x.shape, "uint8"),
        random.bits(s.keys, b.x.shape, "uint16"),
    ),
    "with the rows behind heads": lambda s, b: random.bits(s.keys, (3, b.x.shape[0], 2)),
    "with the rows last": lambda s, b: random.bits(s.keys, (3, 2, b.x.shape[0])),
    "rows against rows": lambda s, b: random.bits(s.keys, (b.x.shape[0], b.x.shape[0])),
    "twice as many": lambda s, b: random.bits(s.keys, (2 * b.x.shape[0], 3)),
    "half as many": lambda s, b: random.bits(s.keys, (b.x.shape[0] // 2, 3)),
    "for what every device has": lambda s, b: s.v + random.normal(s.keys, s.v.shape),
    "as many as rows, kept whole": lambda s, b: jnp.sort(random.bits(s.keys, b.o.shape)),
    "integers": lambda s, b: random.randint(s.keys, b.x.shape, 0, 100),
    "a choice": lambda s, b: random.categorical(s.keys, b.x),
    "an exponential": lambda s, b: random.exponential(s.keys, b.x.shape),
    "gamma": lambda s, b: random.gamma(s.keys, jnp.abs(b.x) + 1),
    "gamma for every device": lambda s, b: random.gamma(s.keys, jnp.abs(s.v) + 1),
    "a permutation of features": lambda s, b: random.permutation(s.keys, b.x, axis=1),
}
KEYS: Family = {
    "a key for each row": lambda s, b: random.split(s.keys, b.o.shape),
    "a draw for each row": lambda s, b: jax.vmap(lambda k: random.normal(k, (3,)))(
        random.split(s.keys, b.o.shape)
    ),
    "draws of rows for each row": lambda s, b: jax.vmap(lambda k: random.bits(k, b.o.shape))(
        random.split(s.keys, b.o.shape)
    ),
    "two keys": lambda s, b: [random.bits(k, b.o.shape) for k in random.split(s.keys)],
    "a few keys, each for rows": lambda s, b: jax.vmap(lambda k: random.bits(k, b.o.shape))(
        random.split(s.keys, 3)
    ),
    "a few keys, each for rows and features": lambda s, b: jax.vmap(
        lambda k: random.bits(k, b.x.shape)
    )(random.split(s.keys, 3)),
    "folded with rows": lambda s, b: jax.vmap(lambda k: random.fold_in(s.keys, k))(b.k),
    "folded with rows, and drawn": lambda s, b: jax.vmap(
        lambda k: random.bits(random.fold_in(s.keys, k), (2,))
    )(b.k),
    "folded with a sum": lambda s, b: random.fold_in(s.keys, b.k.sum()),
    "folded with the count of rows": lambda s, b: random.fold_in(s.keys, b.o.shape[0]),
    "keys by a key for each row": lambda s, b: jax.vmap(lambda k: random.split(k, 2))(
        random.split(s.keys, b.o.shape)
    ),
    "a key for each row, gathered": lambda s, b: random.split(s.keys, b.o.shape)[::-1],
    "gathered keys that draw": lambda s, b: jax.vmap(lambda k: random.bits(k, (2,)))(
        random.split(s.keys, b.o.shape)[::-1]
    ),
    "gathered keys that draw for rows": lambda s, b: jax.vmap(lambda k: random.bits(k, b.o.shape))(
        random.split(s.keys, b.o.shape)[::-1]
    ),
    "keys chosen by rows": lambda s, b: random.split(s.keys, 6)[b.k],
    "the data of keys": lambda s, b: random.key_data(random.split(s.keys, b.o.shape)),
    "keys from data": lambda s, b: random.wrap_key_data(
        jnp.stack([b.k, b.k], 1).astype(jnp.uint32)
    ),
    "a key of the old kind": lambda s, b: random.bits(random.PRNGKey(3), b.x.shape),
    "keys of the old kind": lambda s, b: random.split(random.key_data(s.keys), b.x.shape[0]),
}
NUMBERED: Family = {
    "a permutation of each row": lambda s, b: random.permutation(
        s.keys, b.x, axis=1, independent=True
    ),
    "a permutation of rows": lambda s, b: b.x[random.permutation(s.keys, 8)],
    "as wide as the batch is long": lambda s, b: s.v[:, None] * random.normal(s.keys, (6, 8)),
    "as long as the batch, for no row": lambda s, b: (
        jnp.sort(random.normal(s.keys, (8, 8))) @ jnp.ones(8)
    ),
    "a key for each row, and one more": lambda s, b: random.split(s.keys, 9)[1:],
}


@pytest.mark.grid
@pytest.mark.parametrize(("devices", "letter"), every_way((4, True), (2, False)))
@pytest.mark.parametrize("family", [DRAWS, KEYS], ids=["draws", "keys"])
def test_random_numbers(family: Family, devices: int, *, letter: bool) -> None:
    check(family, devices=devices, letter=letter)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_random_numbers_for_a_number_of_rows(devices: int) -> None:
    check(NUMBERED, devices=devices, letter=False)
