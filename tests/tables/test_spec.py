"""What a table is, as text; which server has a key."""

import json

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.tables import Adagrad, ByChance, Capacity, Normal, TableSpec, TableStore, Unseen
from jaxfleet.tables.buckets import BUCKETS, bucket_of, buckets_of, server_of
from jaxfleet.tables.spec import KINDS

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_is_its_text_again(kind: str) -> None:
    part = KINDS[kind]()
    spec = TableSpec(name="t", dim=3, admission=part, evictions=(part, Unseen(7)))
    assert TableSpec.from_text(spec.to_text()) == spec


def test_all_parts_keep_their_fields() -> None:
    spec = TableSpec(
        name="users",
        dim=8,
        initializer=Normal(0.5, 2.0, seed=3),
        optimizer=Adagrad(0.1, epsilon_outside=True),
        admission=ByChance(0.25, seed=4, candidates=9),
        evictions=(Capacity(10, "lfu"),),
        on_nan="skip",
    )
    assert TableSpec.from_text(spec.to_text()) == spec
    assert json.loads(spec.to_text())["evictions"][0]["policy"] == "lfu"


NO_SPECS = [
    "",
    "[]",
    '{"name": "t"}',
    '{"name": "t", "dim": 1, "x": 2}',
    '{"name": "t", "dim": 1, "optimizer": {"kind": "none"}}',
]


@pytest.mark.parametrize("text", NO_SPECS)
def test_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="no table is described by"):
        TableSpec.from_text(text)


@pytest.mark.parametrize("servers", [1, 2, 3, 7, BUCKETS])
def test_every_bucket_is_on_one_server(servers: int) -> None:
    held = [bucket for server in range(servers) for bucket in buckets_of(server, servers)]
    assert held == list(range(BUCKETS))
    keys = RANDOM.integers(-(2**62), 2**62, 2000)
    for key_bucket, server in zip(bucket_of(keys), server_of(keys, servers), strict=True):
        assert key_bucket in buckets_of(server, servers)


def test_keys_in_a_row_are_spread_over_buckets() -> None:
    counts = np.bincount(bucket_of(np.arange(100 * BUCKETS)), minlength=BUCKETS)
    assert counts.min() > 50
    assert counts.max() < 160


def test_a_part_of_buckets_fills_a_store_as_well_as_all() -> None:
    """Buckets are of the upper bits of a hash and homes of the lower: else homes would crowd."""
    keys = np.arange(400_000)
    mine = keys[server_of(keys, 8) == 3]
    store = TableStore(TableSpec(name="t", dim=1))
    store.look_up(mine)
    assert len(store) == len(mine)
    assert store.stats()["bytes_held"] <= len(mine) * (8 + 12 / 0.5) + 12 * 1024
