"""Text of a table's spec, and the server of a key."""

import json
from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.tables import (
    Adagrad,
    Adam,
    AfterCount,
    ByChance,
    ByScore,
    Capacity,
    Constant,
    Momentum,
    Normal,
    Rmsprop,
    Sgd,
    TableSpec,
    TableStore,
    Uniform,
    Unseen,
)
from jaxfleet.tables.buckets import BUCKETS, bucket_of, buckets_of, server_of
from jaxfleet.tables.spec import KINDS, ROLES
from jaxfleet.tables.validation import Part

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_is_its_text_again(kind: str) -> None:
    part = KINDS[kind]()
    (role,) = (role for role, kinds in ROLES.items() if isinstance(part, kinds))
    given: dict[str, Any] = {"evictions": (Unseen(7),)}
    given[role] = (part, Unseen(7)) if role == "evictions" else part
    spec = TableSpec(name="t", dim=3, **given)
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


NO_PARTS: list[tuple[type[Part], str, Any]] = [
    (Sgd, "learning_rate", float("nan")),
    (Sgd, "learning_rate", 1e39),
    (Sgd, "learning_rate", "0.1"),
    (Sgd, "learning_rate", True),
    (Momentum, "momentum", 1.5),
    (Adam, "beta1", 1.0),
    (Adam, "beta2", 1 - 1e-12),
    (Adam, "epsilon", 0.0),
    (Rmsprop, "epsilon", 1e-60),
    (Adagrad, "initial", -0.1),
    (Normal, "stddev", -1.0),
    (Uniform, "high", -1.0),
    (Uniform, "seed", 2**63),
    (Constant, "value", float("inf")),
    (AfterCount, "count", 0),
    (AfterCount, "count", 2**31),
    (AfterCount, "candidates", 0),
    (ByChance, "probability", 1.01),
    (Unseen, "steps", -1),
    (Capacity, "rows", 1.5),
    (Capacity, "policy", "fifo"),
    (ByScore, "threshold", float("nan")),
]


@pytest.mark.parametrize(("kind", "name", "value"), NO_PARTS)
def test_a_number_that_would_make_rows_of_no_use_is_refused(
    kind: type[Part], name: str, value: Any
) -> None:
    with pytest.raises(ProgramError, match=f"{kind.__name__}: .*{name}"):
        kind(**{name: value})


def test_numbers_of_numpy_are_those_of_python() -> None:
    given = Uniform(np.float32(-0.5), np.array(0.25), seed=np.int64(-7))  # type: ignore[arg-type]
    assert given == Uniform(-0.5, 0.25, seed=-7)
    assert given.kind in TableSpec(name="t", dim=1, initializer=given).to_text()


def test_what_is_no_part_is_refused() -> None:
    for given in ({"optimizer": Sgd}, {"optimizer": "sgd"}, {"evictions": (Capacity,)}):
        with pytest.raises(ProgramError, match=r"of jf\.tables"):
            TableSpec(name="t", dim=1, **given)


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
    """Buckets use the upper bits of a hash and homes the lower: otherwise homes would crowd."""
    keys = np.arange(400_000)
    mine = keys[server_of(keys, 8) == 3]
    store = TableStore(TableSpec(name="t", dim=1))
    store.look_up(mine)
    assert len(store) == len(mine)
    assert store.stats()["bytes_held"] <= len(mine) * (8 + 12 / 0.5) + 12 * 1024
