"""Admission of keys to their own rows."""

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.tables import AfterCount, ByChance, Constant, Sgd, TableSpec, TableStore, Unseen
from jaxfleet.tables.buckets import BUCKETS, server_of
from jaxfleet.tables.validation import Part
from tests.tables.crowded import crowd

KEYS = np.array([0, -1, 5, np.iinfo(np.int64).min])
ONES = np.ones((4, 2), np.float32)
RANDOM = np.random.default_rng(0)


def store_of(admission: Part) -> TableStore:
    spec = TableSpec(
        name="t",
        dim=2,
        initializer=Constant(10.0),
        optimizer=Sgd(1.0),
        admission=admission,
    )
    return TableStore(spec)


def test_a_key_has_its_row_from_the_push_on_that_completes_the_count() -> None:
    store = store_of(AfterCount(3))
    for push in range(5):
        expected = 10.0 - max(0, push - 2)
        np.testing.assert_array_equal(store.look_up(KEYS), expected * ONES)
        assert len(store) == (4 if push >= 3 else 0)
        assert store.stats()["candidates"] == (4 if 0 < push < 3 else 0)
        store.update(KEYS, ONES, step=push)


def test_looking_up_counts_nothing() -> None:
    store = store_of(AfterCount(1))
    for _ in range(3):
        store.look_up(KEYS)
    assert len(store) == store.stats()["candidates"] == 0


def test_gradients_that_are_skipped_count_nothing() -> None:
    store = TableStore(TableSpec(name="t", dim=1, admission=AfterCount(1), on_nan="skip"))
    store.update(KEYS, np.array([[1], [np.inf], [1], [np.nan]], np.float32))
    assert sorted(store.export()[0].tolist()) == [0, 5]
    assert store.stats()["skipped"] == 2


def test_deltas_wait_as_gradients_do() -> None:
    store = store_of(AfterCount(2))
    store.add(KEYS, ONES)
    assert len(store) == 0
    store.add(KEYS, ONES)
    np.testing.assert_array_equal(store.look_up(KEYS), 11 * ONES)


def test_chance_lets_in_as_many_as_it_should_and_the_same_each_time() -> None:
    keys = RANDOM.integers(-(2**62), 2**62, 4000)
    grads = np.zeros((len(keys), 2), np.float32)
    stores = [store_of(ByChance(0.2, seed=seed)) for seed in (1, 1, 2)]
    for store in stores:
        for _ in range(3):
            store.update(keys, grads)
    first, again, other = ({*store.export()[0].tolist()} for store in stores)
    assert first == again
    assert first != other
    expected = 1 - 0.8**3
    assert abs(len(first) / len(keys) - expected) < 5 * (expected / len(keys)) ** 0.5


@pytest.mark.parametrize("admission", [AfterCount(3), ByChance(0.3), AfterCount(3, BUCKETS)])
def test_servers_let_in_what_one_store_does(admission: Part) -> None:
    whole, parts = store_of(admission), [store_of(admission) for _ in range(3)]
    for step in range(6):
        keys = np.unique(RANDOM.integers(0, 600, 400))
        grads = RANDOM.normal(size=(len(keys), 2)).astype(np.float32)
        whole.update(keys, grads, step=step)
        for server, part in enumerate(parts):
            mine = server_of(keys, 3) == server
            part.update(keys[mine], grads[mine], step=step)
    together = [np.concatenate(halves) for halves in zip(*(p.export() for p in parts), strict=True)]
    for mine, theirs in zip(whole.export(), together, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_candidates_are_bounded_and_the_longest_not_pushed_are_forgotten() -> None:
    store, crowded = store_of(AfterCount(2, candidates=100 * BUCKETS)), crowd(500)
    for step in range(50):
        keys = crowded[10 * step : 10 * step + 10]
        store.update(keys, np.zeros((10, 2), np.float32), step=step)
        assert store.stats()["candidates"] <= 100
    store.update(crowded[490:], np.ones((10, 2), np.float32), step=50)
    assert sorted(store.export()[0].tolist()) == crowded[490:].tolist()
    store.update(crowded[:10], np.ones((10, 2), np.float32), step=51)
    assert len(store) == 10  # they were forgotten, and are counted from 0


def test_counts_are_saved_and_go_on() -> None:
    store, other = store_of(AfterCount(3)), store_of(AfterCount(3))
    for step in range(2):
        store.update(KEYS[: 2 + step], ONES[: 2 + step], step=step)
    for batch in store.batches():
        other.put(batch)
    for one in (store, other):
        one.update(KEYS, ONES, step=2)
    assert {*other.export()[0].tolist()} == {0, -1}
    for mine, theirs in zip(store.batches(), other.batches(), strict=True):
        np.testing.assert_array_equal(mine.candidates, theirs.candidates)
        np.testing.assert_array_equal(mine.counts, theirs.counts)
        np.testing.assert_array_equal(mine.counted, theirs.counted)


def test_what_lets_no_keys_in_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"Unseen\(.*\) is no admission"):
        store_of(Unseen())
