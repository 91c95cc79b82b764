"""Compressed gradients: residuals are sent later, malformed ones are rejected."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from jaxfleet.ps.gradient_encoding import METHODS, Residuals, decode, decode_gradients

RANDOM = np.random.default_rng(0)
FLOATS = st.floats(-1e4, 1e4, width=32)


@pytest.mark.parametrize("method", METHODS)
@given(array=arrays_of.arrays(np.float32, arrays_of.array_shapes(max_dims=3), elements=FLOATS))
def test_the_sum_of_what_came_is_the_sum_of_what_was_sent(method: str, array: np.ndarray) -> None:
    residuals, came = Residuals(), np.zeros(array.shape, np.float64)
    # The residual is always at most the loss of one message. For topk that is all but k of the
    # elements, each of which had to wait for its turn.
    for _ in range(4):
        came += decode(residuals.encode("g", array, method, 0.5), method, array.shape)
    left = residuals._left["g"]  # noqa: SLF001  # the test is about the residual
    np.testing.assert_allclose(came + left, 4.0 * array, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("method", "loss"), [("fp16", 2**-11), ("int8", 0.5 / 127)])
def test_one_message_loses_so_little(method: str, loss: float) -> None:
    array = RANDOM.normal(size=(5, 700)).astype(np.float32)
    came = decode(Residuals().encode("g", array, method, 1.0), method, array.shape)
    assert np.abs(came - array).max() <= loss * np.abs(array).max() * (1 + 1e-6)


def test_the_greatest_travel_first_and_the_others_with_their_turn() -> None:
    array = np.array([[1, -4], [3, 2]], np.float32)
    residuals, seen = Residuals(), []
    for _ in range(2):
        data = residuals.encode("g", array, "topk", 0.25)
        assert data.size == 8
        seen.append(decode(data, "topk", array.shape).tolist())
    assert seen == [[[0, -4], [0, 0]], [[0, 0], [6, 0]]]


@pytest.mark.parametrize(
    ("method", "count"), [("fp16", 8192), ("int8", 4096 + 16), ("topk", 8 * 41)]
)
def test_so_many_bytes_travel(method: str, count: int) -> None:
    array = RANDOM.normal(size=4096).astype(np.float32)
    assert Residuals().encode("g", array, method, 0.01).nbytes == count


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_arrives_and_does_not_stay(method: str) -> None:
    array = np.array([1, np.nan, 2, 3], np.float32)
    residuals = Residuals()
    assert np.isnan(decode(residuals.encode("g", array, method, 0.5), method, (4,))).any()
    later = decode(residuals.encode("g", np.ones(4, np.float32), method, 1.0), method, (4,))
    assert np.isfinite(later).all()


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_such_gradient_are_refused(method: str) -> None:
    for size in (1, 3, 7, 9, 1000):
        with pytest.raises(ValueError, match=r".+"):
            decode(np.full(size, 255, np.uint8), method, (4,))


def test_no_room_is_made_for_a_shape_that_nobody_expects() -> None:
    array = Residuals().encode("g", np.ones(4, np.float32), "topk", 1.0)
    with pytest.raises(ValueError, match=r"shape \[1000000000000\], not \[4\]"):
        decode_gradients({"g": array}, {"g": ["topk", 10**12]}, {"g": (4,)})
    with pytest.raises(ValueError, match="is missing"):
        decode_gradients({}, {"g": ["topk", 4]}, {"g": (4,)})
