"""Normalization, by its formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.ops.fluid.schema import schema_of
from tests.ops.fluid.computed import computed

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(1.0, 2.0, size=(3, 4, 2, 5)).astype(np.float32)
SCALE, BIAS, MEAN = (RANDOM.normal(size=4).astype(np.float32) for _ in range(3))
VARIANCE = RANDOM.uniform(0.5, 2.0, 4).astype(np.float32)
GIVEN = {"Scale": SCALE, "Bias": BIAS, "Mean": MEAN, "Variance": VARIANCE}


def wide(x: np.ndarray) -> np.ndarray:
    return x.reshape(1, 4, 1, 1)


def test_a_batch_is_normalized_by_itself_and_averages_follow() -> None:
    made = computed("batch_norm", {"momentum": 0.8}, X=IMAGES, **GIVEN)
    mean, variance = IMAGES.mean((0, 2, 3)), IMAGES.var((0, 2, 3))
    inverse = 1 / np.sqrt(variance + 1e-5)
    wanted = (IMAGES - wide(mean)) * wide(inverse * SCALE) + wide(BIAS)
    np.testing.assert_allclose(made["Y"], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made["MeanOut"], 0.8 * MEAN + 0.2 * mean, rtol=1e-5)
    np.testing.assert_allclose(made["VarianceOut"], 0.8 * VARIANCE + 0.2 * variance, rtol=1e-5)
    np.testing.assert_allclose(made["SavedMean"], mean, rtol=1e-5)
    np.testing.assert_allclose(made["SavedVariance"], inverse, rtol=1e-5)
    last = computed("batch_norm", {"data_layout": "NHWC"}, X=np.moveaxis(IMAGES, 1, 3), **GIVEN)
    np.testing.assert_allclose(np.moveaxis(last["Y"], 3, 1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", ["is_test", "use_global_stats"])
def test_the_averages_normalize_where_they_are_asked_for(by: str) -> None:
    made = computed("batch_norm", {by: True}, X=IMAGES, **GIVEN)
    wanted = (IMAGES - wide(MEAN)) / wide(np.sqrt(VARIANCE + 1e-5)) * wide(SCALE) + wide(BIAS)
    np.testing.assert_allclose(made["Y"], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(made["MeanOut"], MEAN)
    np.testing.assert_array_equal(made["VarianceOut"], VARIANCE)


@pytest.mark.few(1)
@pytest.mark.parametrize("given", [{}, {"use_global_stats": True}, {"data_layout": "NHWC"}])
def test_the_gradient_of_batch_norm_is_that_of_what_it_computes(given: dict[str, Any]) -> None:
    schema = schema_of("batch_norm")
    assert schema is not None
    assert schema.compute is not None
    assert schema.gradient is not None
    assert schema.gradient.compute is not None
    attrs = {**schema.attrs, **given}
    x = np.moveaxis(IMAGES, 1, 3) if "data_layout" in given else IMAGES
    grad = RANDOM.normal(size=x.shape).astype(np.float32)

    def run(*values: jax.Array) -> Any:
        assert schema is not None
        assert schema.compute is not None
        return schema.compute(attrs, *values, MEAN, VARIANCE)

    (made, *rest), pull = jax.vjp(run, *map(jnp.asarray, (x, SCALE, BIAS)))
    wanted = pull((jnp.asarray(grad), *map(jnp.zeros_like, rest)))
    reads = {"X": x, **GIVEN, "SavedMean": rest[2], "SavedVariance": rest[3]}
    found = schema.gradient.compute(attrs, reads, {"Y": grad})
    for name, value in zip(("X", "Scale", "Bias"), wanted, strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4)
    assert made.shape == x.shape


def test_rows_are_normalized_each_by_itself() -> None:
    x = RANDOM.normal(2.0, 3.0, size=(2, 3, 4)).astype(np.float32)
    scale, bias = (RANDOM.normal(size=12).astype(np.float32) for _ in range(2))
    made = computed("layer_norm", {"begin_norm_axis": 1}, X=x, Scale=scale, Bias=bias)
    rows = x.reshape(2, 12)
    mean, variance = rows.mean(1), rows.var(1)
    unit = (rows - mean[:, None]) / np.sqrt(variance[:, None] + 1e-5)
    np.testing.assert_allclose(made["Y"], (unit * scale + bias).reshape(x.shape), rtol=1e-4,
                               atol=1e-5)  # fmt: skip
    np.testing.assert_allclose(made["Mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(made["Variance"], variance, rtol=1e-5)
    bare = computed("layer_norm", {"begin_norm_axis": 2}, X=x)["Y"]
    np.testing.assert_allclose(bare.mean(-1), np.zeros((2, 3)), atol=1e-5)
    spread = x.std(-1) / np.sqrt(x.var(-1) + 1e-5)
    np.testing.assert_allclose(bare.std(-1), spread, rtol=1e-4)


def test_a_vector_is_divided_by_its_length() -> None:
    x = RANDOM.normal(size=(3, 4)).astype(np.float32)
    made = computed("norm", {"axis": 1, "epsilon": 1e-10}, X=x)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(made["Out"], x / length, rtol=1e-5)
    np.testing.assert_allclose(made["Norm"], length, rtol=1e-5)


def test_data_norm_normalizes_by_the_rows_so_far_and_counts_new_ones() -> None:
    """The parameters' gradients are not derivatives but a batch's increments of counts and sums."""
    x = RANDOM.normal(size=(5, 4)).astype(np.float32)
    size, total = np.full(4, 40.0, np.float32), 10 * MEAN
    given = {"X": x, "BatchSize": size, "BatchSum": total, "BatchSquareSum": 40 * VARIANCE}
    made = computed("data_norm", {}, **given)
    means, scales = total / size, 1 / np.sqrt(VARIANCE)
    np.testing.assert_allclose(made["Y"], (x - means) * scales, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made["Means"], means, rtol=1e-6)
    np.testing.assert_allclose(made["Scales"], scales, rtol=1e-6)
    schema = schema_of("data_norm")
    assert schema is not None
    assert schema.gradient is not None
    assert schema.gradient.compute is not None
    back = RANDOM.normal(size=(5, 4)).astype(np.float32)
    reads = {name: jnp.asarray(value) for name, value in {**given, **made}.items()}
    found = schema.gradient.compute({"epsilon": 0.5}, reads, {"Y": jnp.asarray(back)})
    np.testing.assert_allclose(found["X"], back * scales, rtol=1e-5)
    np.testing.assert_allclose(found["BatchSize"], np.full(4, 5.0))
    np.testing.assert_allclose(found["BatchSum"], x.sum(0), rtol=1e-4, atol=1e-5)
    squares = ((x - means) ** 2).sum(0) + 5 * 0.5
    np.testing.assert_allclose(found["BatchSquareSum"], squares, rtol=1e-4)
