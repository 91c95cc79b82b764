"""Order and time of evictions."""

from typing import Any, Literal

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.tables import ByScore, Capacity, Sgd, TableSpec, TableStore, Unseen
from jaxfleet.tables.buckets import BUCKETS, server_of
from jaxfleet.tables.eviction import first_to_go
from jaxfleet.tables.validation import Part
from tests.tables.crowded import crowd

RANDOM = np.random.default_rng(0)
CROWD = crowd(500)  # keys are given by their index in it


def store_of(*evictions: Part) -> TableStore:
    return TableStore(TableSpec(name="t", dim=1, evictions=evictions))


def at_most(rows: int, policy: Literal["lru", "lfu"] = "lru") -> Capacity:
    """Returns the capacity of a table with this many rows per bucket."""
    return Capacity(rows * BUCKETS, policy)


def touch(store: TableStore, keys: range | list[int], step: int, **counts: Any) -> None:
    grads = np.ones((len(keys), 1), np.float32)
    store.update(CROWD[keys], grads, step=step, **counts)


def keys_of(store: TableStore) -> set[int]:
    return set(np.searchsorted(CROWD, store.export()[0]).tolist())


def test_shrink_takes_out_what_no_step_touched_for_long() -> None:
    store = store_of(Unseen(steps=10))
    touch(store, range(6), 0)
    touch(store, range(3), 5)
    assert store.shrink(10) == 0
    assert store.shrink(11) == 3
    assert keys_of(store) == {0, 1, 2}
    assert store.stats()["evicted"] == 3


def test_a_row_that_comes_again_begins_anew() -> None:
    store = TableStore(TableSpec(name="t", dim=1, evictions=(Unseen(1),), optimizer=Sgd(1.0)))
    fresh = store.look_up(CROWD[:5])
    touch(store, range(5), 1)
    store.shrink(3)
    assert len(store) == 0
    np.testing.assert_array_equal(store.look_up(CROWD[:5]), fresh)


def test_the_least_recently_touched_go_when_there_are_too_many() -> None:
    store = store_of(at_most(100))
    for step in range(30):
        touch(store, [*range(5), *range(10 * step + 100, 10 * step + 110)], step)
        assert len(store) <= 100
    kept = keys_of(store)
    assert kept >= set(range(5))
    oldest = min(kept - set(range(5)))  # some of its step may be evicted, but no later ones
    assert kept >= set(range(oldest // 10 * 10 + 10, 400))
    assert len(kept) > 90


def test_the_least_often_touched_go_when_there_are_too_many() -> None:
    store = store_of(at_most(100, "lfu"))
    for step in range(4):
        touch(store, range(60), step)
    for step in range(4, 30):
        touch(store, range(10 * step + 100, 10 * step + 110), step)
        assert len(store) <= 100
    assert keys_of(store) >= set(range(60))


def test_a_bucket_that_has_too_many_takes_none_of_the_others() -> None:
    store = store_of(at_most(20))
    others = crowd(20, bucket=8)
    store.look_up(others, step=0)
    touch(store, range(30), 1)
    assert len(store) == 19 + 20  # a sixteenth is kept free
    assert set(others) < set(store.export()[0])


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_same_rows_go_on_any_number_of_servers(policy: Literal["lru", "lfu"]) -> None:
    spec = TableSpec(name="t", dim=1, evictions=(Capacity(3 * BUCKETS + 5, policy),))
    drawn = [np.unique(RANDOM.zipf(1.1, 800) % 20_000) for _ in range(12)]
    found = []
    for servers in (1, 2, 5):
        stores = [TableStore(spec) for _ in range(servers)]
        for step, keys in enumerate(drawn):
            for server, store in enumerate(stores):
                mine = keys[server_of(keys, servers) == server]
                store.look_up(mine, step=step)
                store.update(mine, np.ones((len(mine), 1), np.float32), step=step)
        keys, rows = (np.concatenate(x) for x in zip(*(s.export() for s in stores), strict=True))
        found.append((keys.tobytes(), rows.tobytes(), sum(s.stats()["evicted"] for s in stores)))
    assert found[0] == found[1] == found[2]
    assert found[0][2] > 100


def test_rows_that_come_and_go_otherwise_are_counted() -> None:
    store, other = store_of(at_most(20), Unseen(2)), store_of(at_most(20))
    for step in range(40):
        touch(store, [*range(5), 5 + step, 200 - step], step)
        if step % 3 == 2:
            store.shrink(step)
        if step % 7 == 6:
            for batch in store.batches():
                other.put(batch)
            store.drop([7])
            assert len(store) == 0
            for batch in other.batches():
                store.put(batch)
            other.clear()
        assert len(store) <= 20
    touch(store, range(300, 320), 50)
    assert keys_of(store) < set(range(300, 320))
    assert len(store) == 19


def test_a_capacity_has_a_row_for_each_bucket() -> None:
    with pytest.raises(ProgramError, match="at most 1023 rows of table 't', of 1024 buckets"):
        store_of(Capacity(1023))


def test_which_rows_go_does_not_depend_on_how_they_came() -> None:
    kept = []
    for order in (range(300), RANDOM.permutation(300).tolist()):
        store = store_of(at_most(150))
        store.look_up(CROWD[order])
        touch(store, [7], 1)
        kept.append(keys_of(store))
    assert kept[0] == kept[1]
    assert 7 in kept[0]


def test_a_million_rows_are_chosen_from_as_by_sorting() -> None:
    keys = RANDOM.permutation(5000)
    by = RANDOM.integers(0, 7, 5000), RANDOM.integers(0, 40, 5000)
    order = np.lexsort(by[::-1])
    for count in (1, 37, 2500, 5000):
        chosen = first_to_go(count, keys, *by)
        assert len(set(chosen.tolist())) == count
        worst = by[0][order[count - 1]] * 100 + by[1][order[count - 1]]
        values = by[0] * 100 + by[1]
        assert (values[chosen] <= worst).all()
        assert set(np.flatnonzero(values < worst)) <= set(chosen.tolist())


def test_rows_of_a_low_score_go_and_all_scores_decay() -> None:
    score = ByScore(nonclk_coeff=0.1, click_coeff=1.0, decay=0.5, threshold=0.8)
    store = store_of(score)
    shows = np.array([2, 2, 20, 2], np.float32)
    clicks = np.array([0, 2, 0, 1], np.float32)
    touch(store, range(4), 1, shows=shows, clicks=clicks)
    # after the decay: 0.1, 1.0, 1.0 and 0.55
    assert store.shrink(2) == 2
    assert keys_of(store) == {1, 2}
    touch(store, [1], 3, shows=np.ones(1, np.float32), clicks=np.ones(1, np.float32))
    assert store.shrink(4) == 1  # 1.0 of key 1, 0.5 of key 2
    assert keys_of(store) == {1}


def test_shows_need_a_score() -> None:
    with pytest.raises(ProgramError, match="keeps none"):
        touch(store_of(), [1], 0, shows=np.ones(1, np.float32))


def test_what_says_nothing_of_rows_that_go_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"Sgd\(.*\) is no eviction"):
        store_of(Sgd())
    with pytest.raises(ProgramError, match="'unseen' 2 times"):
        store_of(Unseen(), Unseen())
