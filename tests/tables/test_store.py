"""A table's rows against a dict of them: created by key, updated, saved, restored."""

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.errors import ProgramError
from jaxfleet.tables import (
    Adagrad,
    Adam,
    AfterCount,
    ByScore,
    Capacity,
    Momentum,
    RowBatch,
    Sgd,
    TableSpec,
    TableStore,
    Unseen,
)
from jaxfleet.tables.buckets import bucket_of, buckets_of
from jaxfleet.tables.initializers import initial_rows
from jaxfleet.tables.merge_pushes import merge
from tests.drawing import at_most

RANDOM = np.random.default_rng(0)
EXTREMES = np.array([0, -1, 1, np.iinfo(np.int64).max, np.iinfo(np.int64).min])
FEW = np.concatenate([EXTREMES, np.arange(2, 20)])

some = st.lists(st.sampled_from(FEW.tolist()), unique=True).map(lambda k: np.array(k, np.int64))
actions = st.lists(
    st.tuples(st.sampled_from(["look_up", "update", "add", "drop", "shrink", "move"]), some),
    max_size=15,
)


def spec_of(optimizer: Sgd | Adagrad, **others: object) -> TableSpec:
    return TableSpec(name="t", dim=3, optimizer=optimizer, **others)  # type: ignore[arg-type]


class Oracle:
    """A store's operations on a dict."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.rows: dict[int, np.ndarray] = {}
        self.touched: dict[int, int] = {}

    def look_up(self, keys: np.ndarray, step: int) -> np.ndarray:
        for key in keys.tolist():
            if key not in self.rows:
                (self.rows[key],) = initial_rows(self.spec.initializer, np.array([key]), 3)
                self.touched[key] = step
        return np.array([self.rows[key] for key in keys.tolist()], np.float32).reshape(-1, 3)

    def add(self, keys: np.ndarray, deltas: np.ndarray, step: int) -> None:
        self.look_up(keys, step)
        for key, delta in zip(keys.tolist(), deltas, strict=True):
            self.rows[key] = self.rows[key] + delta
            self.touched[key] = step

    def keep(self, keys: set[int]) -> None:
        self.rows = {key: row for key, row in self.rows.items() if key in keys}


@at_most(60)
@given(actions)
def test_it_does_what_a_dict_of_rows_does(steps: list[tuple[str, np.ndarray]]) -> None:
    spec = spec_of(Sgd(0.5), evictions=(Unseen(4),))
    store, oracle = TableStore(spec), Oracle(spec)
    for step, (action, keys) in enumerate(steps):
        values = RANDOM.normal(size=(len(keys), 3)).astype(np.float32)
        if action == "look_up":
            found = store.look_up(keys, step=step)
            np.testing.assert_array_equal(found, oracle.look_up(keys, step))
        elif action == "update":
            store.update(keys, values, step=step)
            oracle.add(keys, -np.float32(0.5) * values, step)
        elif action == "add":
            store.add(keys, values, step=step)
            oracle.add(keys, values, step)
        elif action == "drop":
            gone = set(bucket_of(keys).tolist())
            store.drop(gone)
            of = dict(zip(FEW.tolist(), bucket_of(FEW).tolist(), strict=True))
            oracle.keep({key for key in oracle.rows if of[key] not in gone})
        elif action == "shrink":
            store.shrink(step)
            oracle.keep({key for key in oracle.rows if step - oracle.touched[key] <= 4})
        else:
            store = copy_of(store)
        keys_now, rows = store.export()
        assert len(store) == len(keys_now)
        order = np.lexsort((keys_now, bucket_of(keys_now)))
        np.testing.assert_array_equal(order, np.arange(len(order)))
        assert dict(zip(keys_now.tolist(), map(tuple, rows.tolist()), strict=True)) == {
            key: tuple(row.tolist()) for key, row in oracle.rows.items()
        }


def copy_of(store: TableStore) -> TableStore:
    other = TableStore(store.spec)
    for batch in store.batches():
        other.put(batch)
    return other


EVERYTHING = TableSpec(
    name="t",
    dim=3,
    optimizer=Adam(0.1),
    admission=AfterCount(2, candidates=1024),
    evictions=(Unseen(6), Capacity(1024, "lfu"), ByScore(threshold=0.05)),
)


def train(stores: list[TableStore], begin: int, end: int) -> None:
    """Runs the same steps on stores, determined by their numbers."""
    for step in range(begin, end):
        random = np.random.default_rng(step)
        keys = np.unique(random.zipf(1.3, 200) % 1000 - 500)
        grads = random.normal(size=(len(keys), 3)).astype(np.float32)
        counts = random.integers(0, 3, (2, len(keys))).astype(np.float32)
        for store in stores:
            store.look_up(keys, step=step)
            store.update(keys, grads, step=step, shows=counts[0], clicks=counts[1])
            if step % 5 == 4:
                store.shrink(step)


def assert_same(one: TableStore, other: TableStore) -> None:
    batches = zip(one.batches(), other.batches(), strict=True)
    for mine, theirs in batches:
        for name in (f.name for f in fields(RowBatch)):
            left, right = getattr(mine, name), getattr(theirs, name)
            if isinstance(left, np.ndarray):
                left, right = {"": left}, {"": right}
            assert left.keys() == right.keys()
            for part, values in left.items():
                assert values.dtype == right[part].dtype
                np.testing.assert_array_equal(values, right[part], err_msg=f"{name} {part}")


def test_a_store_that_was_put_back_goes_on_to_the_bit() -> None:
    store = TableStore(EVERYTHING)
    train([store], 0, 13)
    other = copy_of(store)
    assert_same(store, other)
    train([store, other], 13, 26)
    assert_same(store, other)
    assert len(store) > 50
    assert store.stats()["evicted"] > 0


@pytest.mark.parametrize("every", [1, 3, 7])
def test_changes_since_a_step_bring_another_store_level(every: int) -> None:
    store, other, since = TableStore(EVERYTHING), TableStore(EVERYTHING), None
    for end in range(every, 30, every):
        train([store], end - every, end)
        for batch in store.batches(since):
            other.put(batch)
        since = end - 1
        store.forget_gone(since)
        assert_same(store, other)
    assert store.stats()["evicted"] > 0


def test_changes_are_only_what_was_touched_and_what_left() -> None:
    store = TableStore(spec_of(Adagrad(), evictions=(Unseen(6),)))
    store.look_up(np.arange(100), step=1)
    assert sum(len(batch.keys) for batch in store.batches()) == 100
    store.update(np.arange(5), np.ones((5, 3), np.float32), step=4)
    store.update(EXTREMES, np.ones((5, 3), np.float32), step=7)
    (changes,) = store.batches(touched_since=4)
    assert set(changes.keys.tolist()) == set(EXTREMES.tolist())
    assert not len(changes.gone)
    store.shrink(9)
    (changes,) = store.batches(touched_since=7)
    assert set(changes.gone.tolist()) == set(range(5, 100))
    assert not len(changes.keys)
    assert not [*store.batches(touched_since=9)]
    store.forget_gone(9)
    assert not [*store.batches(touched_since=7)]


def test_batches_have_whole_buckets_in_their_order() -> None:
    store = TableStore(TableSpec(name="t", dim=1))
    store.look_up(RANDOM.integers(-(2**62), 2**62, 150_000))
    batches = [*store.batches()]
    assert len(batches) > 1
    assert sum(len(batch.keys) for batch in batches) == len(store)
    places = [bucket_of(batch.keys) for batch in batches]
    for before, after in pairwise(places):
        assert before[-1] < after[0]
    for batch, buckets in zip(batches, places, strict=True):
        order = np.lexsort((batch.keys, buckets))
        np.testing.assert_array_equal(order, np.arange(len(order)))


@pytest.mark.parametrize("servers", [2, 3, 7])
def test_any_number_of_servers_has_the_same_rows(servers: int) -> None:
    """Bitwise: rows, state and counters, after steps of sums of three trainers."""
    spec = TableSpec(name="t", dim=3, optimizer=Momentum(0.1))
    whole = TableStore(spec)
    parts = [TableStore(spec) for _ in range(servers)]
    for step in range(8):
        pushes = []
        for _ in range(3):
            keys = np.unique(RANDOM.zipf(1.2, 100) % 400)
            pushes.append((keys, RANDOM.normal(size=(len(keys), 3)).astype(np.float32)))
        whole.update(*merge(pushes), step=step)
        for server, part in enumerate(parts):
            here = buckets_of(server, servers)
            mine = [np.isin(bucket_of(keys), here) for keys, _ in pushes]
            some = [(k[m], g[m]) for (k, g), m in zip(pushes, mine, strict=True)]
            part.update(*merge(some), step=step)
    together = TableStore(spec)
    for part in parts:
        for batch in part.batches():
            together.put(batch)
    assert_same(whole, together)


def test_dropped_buckets_are_what_another_store_has() -> None:
    store = TableStore(EVERYTHING)
    train([store], 0, 9)
    halves = [copy_of(store), copy_of(store)]
    for server, half in enumerate(halves):
        half.drop(buckets_of(1 - server, 2))
    assert sum(len(half) for half in halves) == len(store)
    together = copy_of(halves[0])
    for batch in halves[1].batches():
        together.put(batch)
    assert_same(store, together)


def test_a_gradient_that_is_not_finite_is_refused_whole() -> None:
    store = TableStore(TableSpec(name="t", dim=2))
    before = store.look_up(EXTREMES)
    for odd in (np.nan, np.inf, -np.inf):
        grads = np.ones((5, 2), np.float32)
        grads[2, 1] = odd
        with pytest.raises(ProgramError, match="'t', step 9: the gradient of key 1 is not finite"):
            store.update(EXTREMES, grads, step=9)
    np.testing.assert_array_equal(store.look_up(EXTREMES), before)
    assert store.stats()["skipped"] == 0


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    store = TableStore(TableSpec(name="t", dim=2, optimizer=Sgd(1.0), on_nan="skip"))
    before = store.look_up(EXTREMES)
    grads = np.ones((5, 2), np.float32)
    grads[2, 1], grads[4, 0] = np.nan, np.inf
    store.update(EXTREMES, grads)
    after = store.look_up(EXTREMES)
    np.testing.assert_array_equal(after[[2, 4]], before[[2, 4]])
    np.testing.assert_array_equal(after[[0, 1, 3]], before[[0, 1, 3]] - np.float32(1))
    assert store.stats()["skipped"] == 2


def test_no_keys_at_all_and_a_table_without_rows() -> None:
    store = TableStore(EVERYTHING)
    none, nothing = np.empty(0, np.int64), np.empty((0, 3), np.float32)
    assert store.look_up(none).shape == (0, 3)
    store.update(none, nothing)
    store.add(none, nothing)
    assert store.shrink(3) == len(store) == store.drop([1, 2]) == 0
    assert [*store.batches()] == [*store.batches(0)] == []
    assert store.export()[1].shape == (0, 3)
    store.put(RowBatch(none, nothing))
    store.clear()
    assert merge([(none, nothing), (none, nothing)])[1].shape == (0, 3)
    assert store.stats()["bytes_live"] == 0


def test_one_key_many_times_in_a_look_up_is_one_row() -> None:
    store = TableStore(TableSpec(name="t", dim=2))
    rows = store.look_up(np.full(1000, 7))
    assert len(store) == 1
    assert (rows == rows[0]).all()


def test_a_million_keys_at_once() -> None:
    store = TableStore(TableSpec(name="t", dim=1, optimizer=Sgd(1.0)))
    keys = np.arange(-500_000, 500_000)
    before = store.look_up(keys)
    store.update(keys, np.ones((len(keys), 1), np.float32), step=3)
    np.testing.assert_array_equal(store.look_up(keys), before - np.float32(1))
    stats = store.stats()
    assert stats["rows"] == len(keys)
    assert stats["bytes_live"] == len(keys) * (8 + 4 + 4)
    assert stats["bytes_held"] <= len(keys) * (4 + 4 + 12 / 0.5)
    assert stats["longest_pause_s"] > 0


def test_what_was_cleared_is_gone_for_changes_too() -> None:
    store = TableStore(EVERYTHING)
    train([store], 0, 9)
    other = copy_of(store)
    store.clear(step=9)
    assert len(store) == store.stats()["candidates"] == 0
    for batch in store.batches(touched_since=8):
        other.put(batch)
    assert_same(store, other)


def test_arrays_may_be_read_only_in_steps_or_of_another_width() -> None:
    store, other = (TableStore(TableSpec(name="t", dim=2)) for _ in range(2))
    keys, grads = np.arange(20), RANDOM.normal(size=(20, 4)).astype(np.float32)
    frozen = keys.copy()
    frozen.flags.writeable = False
    store.update(frozen[::2], grads[::2, :2])
    other.update(keys[::2].copy().astype(np.int32), grads[::2, :2].copy())
    assert_same(store, other)
    _, sums = merge([(frozen[::2], grads[::2, ::2])])
    np.testing.assert_array_equal(sums, grads[::2, ::2])


def test_a_learning_rate_that_is_not_finite_is_refused() -> None:
    store = TableStore(spec_of(Sgd(0.1)))
    for rate in (np.nan, np.inf, 1e39):
        with pytest.raises(ProgramError, match="and must be a finite float32"):
            store.update(np.arange(2), np.ones((2, store.spec.dim), np.float32), learning_rate=rate)
    assert not len(store)


def test_gradients_of_another_shape_are_refused() -> None:
    store = TableStore(TableSpec(name="t", dim=2))
    with pytest.raises(ProgramError, match=r"gradients \(5, 3\) for 5 keys"):
        store.update(EXTREMES, np.ones((5, 3), np.float32))
    with pytest.raises(ProgramError, match="a row has 0 elements"):
        TableStore(TableSpec(name="t", dim=0))


def test_pushes_are_added_in_their_order() -> None:
    """Float sums depend on their order, which is the given one, bit for bit."""
    pushes = []
    for _ in range(5):
        keys = RANDOM.permutation(50)[: RANDOM.integers(1, 50)] - 25
        pushes.append((keys, RANDOM.normal(size=(len(keys), 4)).astype(np.float32)))
    sums: dict[int, np.ndarray] = {}
    for keys, grads in pushes:
        for key, grad in zip(keys.tolist(), grads, strict=True):
            sums[key] = sums[key] + grad if key in sums else grad
    keys, grads = merge(pushes)
    assert keys.tolist() == list(sums)
    np.testing.assert_array_equal(grads, np.stack(list(sums.values())))
