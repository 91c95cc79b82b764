"""Merged and compressed gradients: the residual of a message is sent with the next."""

from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import PassError
from tests.modes.linear import CLOSE, INPUTS, RATE, batch, first, gradient, trained, twin

TOPK = "compress_sends{method=topk, ratio=0.5, min_elements=1}"
WHOLE: Any = {"servers": 1, "min_block_size": 100}


def greatest(array: np.ndarray) -> np.ndarray:
    """Returns an array with only the greatest half of its elements."""
    kept = np.zeros_like(array)
    places = np.argsort(np.abs(array))[-INPUTS // 2 :]
    kept[places] = array[places]
    return kept


def test_the_mean_of_what_is_merged_is_made_smaller_and_the_rest_comes_later() -> None:
    steps, merge = 9, 3
    options = {"merge": merge, "staleness": merge - 1, "passes": TOPK, **WHOLE}
    (found,), _ = trained("half_async", steps, pulls=True, **options)
    w, left = first(), np.zeros(INPUTS)
    for begin in range(0, steps, merge):
        mean = np.mean([gradient(w, batch(begin + at)) for at in range(merge)], axis=0)
        sent = greatest(mean + left)
        left = mean + left - sent
        w = w - RATE * sent
    np.testing.assert_allclose(found, w, **CLOSE)
    assert np.abs(left).max() > 0.1  # the residual is not empty


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["async", "geo"])
def test_whoever_merges_trains_with_gradients_made_smaller(how: str) -> None:
    options: Any = {"merge": 3, "k_steps": 3, "staleness": 6, "trainers": 2, **WHOLE}
    (_, smaller), _ = trained(how, 60, pulls=True, passes=TOPK, **options)
    (_, whole), _ = trained(how, 60, pulls=True, **options)
    # The model's fixed point, within the noise of some steps of its batches.
    assert np.abs(smaller - whole).max() < 0.1 * np.abs(whole - first()).max()


def test_parameters_are_not_made_smaller() -> None:
    with pytest.raises(PassError, match="sends parameters, and no gradients") as caught:
        twin("fl", k_steps=2, passes=TOPK).programs()
    assert "communication='geo'" in "\n".join(caught.value.__notes__)
