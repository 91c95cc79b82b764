"""A table's rows: made by key, updated, saved, put back."""

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.tables import TableSpec, TableStore
from jaxfleet.tables.merge import merge

EXTREMES = np.array([0, -1, 1, np.iinfo(np.int64).max, np.iinfo(np.int64).min])


def test_a_row_is_updated_where_it_is() -> None:
    store = TableStore(TableSpec(name="t", dim=4))
    before = store.look_up(EXTREMES)
    store.update(EXTREMES[:2], np.ones((2, 4), np.float32), learning_rate=0.5)
    after = store.look_up(EXTREMES)
    np.testing.assert_array_equal(after[:2], before[:2] - np.float32(0.5))
    np.testing.assert_array_equal(after[2:], before[2:])
    assert len(store) == len(EXTREMES)


def test_a_gradient_that_is_not_finite_is_refused_whole() -> None:
    store = TableStore(TableSpec(name="t", dim=1))
    before = store.look_up(EXTREMES)
    grads = np.array([[1], [1], [np.nan], [1], [1]], np.float32)
    with pytest.raises(ProgramError, match="not finite"):
        store.update(EXTREMES, grads)
    np.testing.assert_array_equal(store.look_up(EXTREMES), before)


def test_what_is_put_into_another_store_is_there() -> None:
    store, other = (TableStore(TableSpec(name="t", dim=3)) for _ in range(2))
    store.update(EXTREMES, np.ones((5, 3), np.float32), step=7)
    store.look_up(np.arange(100), step=8)
    for batch in store.batches():
        other.put(batch)
    for mine, theirs in zip(store.export(), other.export(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    (late,) = store.batches(touched_since=7)
    assert set(late.keys.tolist()) == set(range(100)) - {0, 1}


def test_pushes_are_added_in_their_order() -> None:
    pushes = [
        (np.array([5, 1]), np.array([[1.0], [2.0]], np.float32)),
        (np.array([1, 9]), np.array([[3.0], [4.0]], np.float32)),
    ]
    keys, grads = merge(pushes)
    assert dict(zip(keys.tolist(), grads[:, 0].tolist(), strict=True)) == {5: 1.0, 1: 5.0, 9: 4.0}
