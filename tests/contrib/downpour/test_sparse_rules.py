"""The description of a sparse table determines the update of its rows."""

import numpy as np
import pytest

from jaxfleet.contrib.downpour.descriptions import SparseSGDRuleParameter, TableAccessorParameter
from jaxfleet.contrib.downpour.local_tables import table_spec
from jaxfleet.errors import ProgramError
from jaxfleet.tables import TableStore


def store_of(rule: SparseSGDRuleParameter) -> TableStore:
    accessor = TableAccessorParameter("DownpourFeatureValueAccessor", rule)
    return TableStore(table_spec("emb", 3, accessor))


def test_a_row_has_one_sum_of_squares_and_stays_within_its_bounds() -> None:
    store = store_of(SparseSGDRuleParameter(0.5, 3.0, 0.1, (-1.0, 0.25)))
    key, total = np.array([1 << 40]), 0.0
    row = store.look_up(key)[0].astype(np.float64)
    for grad in np.array([[1.0, -0.5, 0.1], [0.2, -3.0, 0.1], [4.0, 0.0, -0.1]]):
        store.update(key, grad[None].astype(np.float32))
        row = np.clip(row - 0.5 * grad * np.sqrt(3.0 / (3.0 + total)), -1.0, 0.25)
        total += (grad * grad).mean()
        np.testing.assert_allclose(store.look_up(key)[0], row, rtol=1e-5)
    assert row.min() == -1.0
    assert row.max() == 0.25


def test_bounds_and_sums_that_cannot_be_are_refused() -> None:
    with pytest.raises(ProgramError, match="initial_g2sum is 0"):
        store_of(SparseSGDRuleParameter(0.5, 0.0, 0.1, (-1.0, 1.0)))
    with pytest.raises(ProgramError, match=r"rows are from 1\.0 to -1\.0"):
        store_of(SparseSGDRuleParameter(0.5, 3.0, 0.1, (1.0, -1.0)))
