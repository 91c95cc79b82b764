"""Convolutions and pooling match plain loops over windows."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.ops.fluid.schema import schema_of
from tests.ops.fluid.computed import computed

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(2, 4, 6, 5)).astype(np.float32)
Pads = tuple[int, int, int, int]  # top, bottom, left, right


def padded(x: np.ndarray, pads: Pads, value: float) -> np.ndarray:
    top, bottom, left, right = pads
    around = ((0, 0), (0, 0), (top, bottom), (left, right))
    return np.pad(x, around, constant_values=value)


def convolved(
    x: np.ndarray, filters: np.ndarray, pads: Pads, *, stride: int, dilation: int, groups: int
) -> np.ndarray:
    x = padded(x, pads, 0.0)
    count, share, high, wide = filters.shape
    rows = (x.shape[2] - (high - 1) * dilation - 1) // stride + 1
    columns = (x.shape[3] - (wide - 1) * dilation - 1) // stride + 1
    made = np.zeros((x.shape[0], count, rows, columns))
    for n, o, i, j in np.ndindex(made.shape):
        group = o // (count // groups)
        for c, h, w in np.ndindex(share, high, wide):
            at = x[n, group * share + c, i * stride + h * dilation, j * stride + w * dilation]
            made[n, o, i, j] += at * filters[o, c, h, w]
    return made


CONVOLUTIONS: list[tuple[dict[str, Any], Pads, int, int, int]] = [
    ({}, (0, 0, 0, 0), 1, 1, 1),
    ({"strides": [2, 2], "paddings": [1, 2]}, (1, 1, 2, 2), 2, 1, 1),
    ({"paddings": [0, 1, 2, 0], "dilations": [2, 2]}, (0, 1, 2, 0), 1, 2, 1),
    ({"groups": 2, "paddings": [1, 1]}, (1, 1, 1, 1), 1, 1, 2),
    ({"groups": 4}, (0, 0, 0, 0), 1, 1, 4),
    ({"padding_algorithm": "SAME", "strides": [2, 2]}, (0, 1, 1, 1), 2, 1, 1),
    ({"padding_algorithm": "VALID", "paddings": [3, 3]}, (0, 0, 0, 0), 1, 1, 1),
]


@pytest.mark.parametrize(("attrs", "pads", "stride", "dilation", "groups"), CONVOLUTIONS)
def test_a_convolution_is_a_sum_over_each_window(
    attrs: dict[str, Any], pads: Pads, stride: int, dilation: int, groups: int
) -> None:
    filters = RANDOM.normal(size=(4, 4 // groups, 3, 3)).astype(np.float32)
    wanted = convolved(IMAGES, filters, pads, stride=stride, dilation=dilation, groups=groups)
    made = computed("conv2d", attrs, Input=IMAGES, Filter=filters)["Output"]
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)
    last = computed(
        "conv2d", {**attrs, "data_format": "NHWC"}, Input=np.moveaxis(IMAGES, 1, 3), Filter=filters
    )["Output"]
    np.testing.assert_allclose(np.moveaxis(last, 3, 1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(("attrs", "pads", "stride", "dilation", "groups"), CONVOLUTIONS[:4])
def test_a_transposed_convolution_is_the_gradient_of_one(
    attrs: dict[str, Any], pads: Pads, stride: int, dilation: int, groups: int
) -> None:
    filters = RANDOM.normal(size=(4, 4 // groups, 3, 3)).astype(np.float32)

    def forward(x: jax.Array) -> Any:
        schema = schema_of("conv2d")
        assert schema is not None
        assert schema.compute is not None
        return schema.compute({**schema.attrs, **attrs}, x, filters, None)

    small, pull = jax.vjp(forward, jnp.asarray(IMAGES))
    given = RANDOM.normal(size=small.shape).astype(np.float32)
    (wanted,) = pull(jnp.asarray(given))
    size = {"output_size": list(IMAGES.shape[2:])}
    made = computed("conv2d_transpose", {**attrs, **size}, Input=given, Filter=filters)["Output"]
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)


def pooled(
    x: np.ndarray, take: Callable[[np.ndarray], float], pads: Pads, shape: tuple[int, int]
) -> np.ndarray:
    """Pools 3 by 3, every 2, by `take`, a function of the part of each window inside the image."""
    made = np.zeros((*x.shape[:2], *shape))
    for n, c, i, j in np.ndindex(made.shape):
        rows = [i * 2 - pads[0] + h for h in range(3)]
        columns = [j * 2 - pads[2] + w for w in range(3)]
        inside = [
            x[n, c, h, w]
            for h, w in itertools.product(rows, columns)
            if 0 <= h < x.shape[2] and 0 <= w < x.shape[3]
        ]
        made[n, c, i, j] = take(np.asarray(inside))
    return made


def mean_of_nine(inside: np.ndarray) -> float:
    return float(inside.sum() / 9)


POOLINGS: list[tuple[dict[str, Any], Callable[[Any], Any], Pads, tuple[int, int]]] = [
    ({}, np.max, (0, 0, 0, 0), (2, 2)),
    ({"paddings": [1, 1]}, np.max, (1, 1, 1, 1), (3, 3)),
    ({"ceil_mode": True}, np.max, (0, 0, 0, 0), (3, 2)),
    ({"pooling_type": "avg", "paddings": [1, 1]}, np.mean, (1, 1, 1, 1), (3, 3)),
    ({"pooling_type": "avg", "paddings": [1, 1], "exclusive": False}, mean_of_nine,
     (1, 1, 1, 1), (3, 3)),
    ({"pooling_type": "avg", "ceil_mode": True}, np.mean, (0, 0, 0, 0), (3, 2)),
    ({"pooling_type": "avg", "padding_algorithm": "SAME"}, np.mean, (0, 1, 1, 1), (3, 3)),
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(("attrs", "take", "pads", "shape"), POOLINGS)
def test_pooling_takes_of_each_window_what_is_in_the_image(
    attrs: dict[str, Any], take: Callable[[Any], Any], pads: Pads, shape: tuple[int, int]
) -> None:
    attrs = {"ksize": [3, 3], "strides": [2, 2], **attrs}
    wanted = pooled(IMAGES, take, pads, shape)
    made = computed("pool2d", attrs, X=IMAGES)["Out"]
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)
    turned = computed("pool2d", {**attrs, "data_format": "NHWC"}, X=np.moveaxis(IMAGES, 1, 3))
    np.testing.assert_allclose(np.moveaxis(turned["Out"], 3, 1), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "take"), [("max", np.max), ("avg", np.mean)])
def test_pooling_of_all_and_into_so_many_windows(kind: str, take: Callable[..., Any]) -> None:
    whole = {"pooling_type": kind, "global_pooling": True, "ksize": [1, 1], "paddings": [2, 2]}
    made = computed("pool2d", whole, X=IMAGES)["Out"]
    np.testing.assert_allclose(made, take(IMAGES, (2, 3), keepdims=True), rtol=1e-5)
    three = {"pooling_type": kind, "adaptive": True, "ksize": [3, 2]}
    made = computed("pool2d", three, X=IMAGES)["Out"]
    rows, columns = [(0, 2), (2, 4), (4, 6)], [(0, 3), (2, 5)]
    for (i, (a, b)), (j, (c, d)) in itertools.product(enumerate(rows), enumerate(columns)):
        wanted = take(IMAGES[:, :, a:b, c:d], (2, 3))
        np.testing.assert_allclose(made[:, :, i, j], wanted, rtol=1e-5, atol=1e-6)
