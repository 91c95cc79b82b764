"""Key to slot, against a dict; growth, removal, and keys of all kinds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.errors import ProgramError
from jaxfleet.tables.buckets import mix
from jaxfleet.tables.hash_index import Index
from jaxfleet.tables.hash_kernels import NOWHERE
from tests.drawing import at_most

RANDOM = np.random.default_rng(0)
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max

some_keys = st.lists(
    st.one_of(st.integers(-3, 40), st.integers(LEAST, MOST), st.sampled_from([LEAST, MOST])),
    max_size=60,
).map(lambda keys: np.array(keys, np.int64))


def check(index: Index, oracle: dict[int, int]) -> None:
    keys, slots = index.items()
    assert dict(zip(keys.tolist(), slots.tolist(), strict=True)) == oracle
    assert len(index) == len(keys) == len(oracle)
    assert len(set(oracle.values())) == len(oracle)


@at_most(60)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "find"]), some_keys), max_size=12))
def test_it_does_what_a_dict_does(actions: list[tuple[str, np.ndarray]]) -> None:
    index, oracle = Index(), dict[int, int]()
    for action, keys in actions:
        if action == "add":
            slots, made = index.add(keys)
            new = dict.fromkeys(keys.tolist()).keys() - oracle.keys()
            assert set(keys[made].tolist()) == new
            assert len(made) == len(new)
            for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
                assert oracle.setdefault(key, slot) == slot
        elif action == "remove":
            there = dict.fromkeys(key for key in keys.tolist() if key in oracle)
            freed = index.remove(keys)
            assert freed.tolist() == [oracle.pop(key) for key in there]
        else:
            found = [oracle.get(key, NOWHERE) for key in keys.tolist()]
            assert index.find(keys).tolist() == found
        check(index, oracle)


def test_keys_are_found_all_the_while_that_it_grows() -> None:
    index = Index()
    keys = RANDOM.integers(LEAST, MOST, 60_000, np.int64)
    grew = 0
    for end in range(500, len(keys) + 1, 500):
        slots, made = index.add(keys[end - 500 : end])
        assert len(made) == 500
        grew += index.growing
        np.testing.assert_array_equal(slots, np.arange(end - 500, end))
        np.testing.assert_array_equal(index.find(keys[:end]), np.arange(end))
        assert (index.find(keys[end : end + 500]) == NOWHERE).all()
    assert grew > 5  # lookups ran while keys were in two tables


def test_keys_are_removed_while_it_grows() -> None:
    index, oracle = Index(), dict[int, int]()
    keys = RANDOM.integers(LEAST, MOST, 40_000, np.int64)
    grew = 0
    for end in range(500, len(keys) + 1, 500):
        slots, _ = index.add(keys[end - 500 : end])
        oracle.update(zip(keys[end - 500 : end].tolist(), slots.tolist(), strict=True))
        grew += index.growing
        gone = RANDOM.choice(keys[:end], 150)
        there = dict.fromkeys(key for key in gone.tolist() if key in oracle)
        assert index.remove(gone).tolist() == [oracle.pop(key) for key in there]
        expected = [oracle.get(key, NOWHERE) for key in keys[:end].tolist()]
        assert index.find(keys[:end]).tolist() == expected
    assert grew > 5
    check(index, oracle)


def test_a_million_keys_one_after_the_other_have_a_million_slots() -> None:
    index = Index()
    keys = np.arange(-500_000, 500_000)
    slots, made = index.add(keys)
    assert len(made) == len(index) == len(keys)
    np.testing.assert_array_equal(np.sort(slots), np.arange(len(keys)))
    np.testing.assert_array_equal(index.find(keys), slots)
    assert index.nbytes <= 12 * len(keys) / 0.5


def test_slots_of_removed_keys_are_used_again() -> None:
    index = Index()
    keys = np.arange(10_000)
    index.add(keys)
    freed = index.remove(keys[::3].copy())
    again, _ = index.add(-1 - keys[: len(freed)])
    assert set(again.tolist()) == set(freed.tolist())
    assert index.slots == len(keys)


def test_no_keys_and_one_key_many_times_are_nothing_special() -> None:
    index = Index()
    empty = np.empty(0, np.int64)
    assert [len(part) for part in index.add(empty)] == [0, 0]
    assert len(index.find(empty)) == len(index.remove(empty)) == 0
    for key in (0, 7, LEAST):
        slots, made = index.add(np.full(1000, key))
        assert made.tolist() == [0]
        assert len(set(slots.tolist())) == 1
    assert index.remove(np.zeros(1000, np.int64)).tolist() == [0]


def test_keys_made_to_collide_are_refused_and_do_not_fill_the_memory() -> None:
    """The mix is invertible, so an attacker could choose keys with equal lower halves of hashes."""
    hashes = (np.arange(2000, dtype=np.uint64) << np.uint64(32)) | np.uint64(0xFFFFFFFF)
    keys = unmix(hashes)
    np.testing.assert_array_equal(mix(keys), hashes)
    index = Index()
    with pytest.raises(ProgramError, match="hashes that are alike"):
        index.add(keys)
    assert index.nbytes < 1 << 20
    assert not len(index)
    assert (index.find(keys) == NOWHERE).all()


def test_a_key_whose_row_could_not_be_made_is_not_there() -> None:
    index, keys = Index(), np.arange(-3000, 3000)
    index.add(keys[:5000])
    with pytest.raises(KeyboardInterrupt), index.adding(keys):
        raise KeyboardInterrupt
    assert len(index) == 5000
    assert (index.find(keys[5000:]) == NOWHERE).all()
    _, made = index.add(keys)
    np.testing.assert_array_equal(made, np.arange(5000, 6000))


def unmix(hashes: np.ndarray) -> np.ndarray:
    mixed = _unshift(hashes, 31) * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    mixed = _unshift(mixed, 27) * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    return (_unshift(mixed, 30) - np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def _unshift(values: np.ndarray, by: int) -> np.ndarray:
    found = values.copy()
    for _ in range(64 // by + 1):
        found = values ^ (found >> np.uint64(by))
    return found
