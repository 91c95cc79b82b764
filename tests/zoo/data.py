"""Batches for the zoo: numpy arrays that depend only on the step and the number of rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Rows = dict[str, Array]

FEATURES = 12
CLASSES = 5
VOCABULARY = 32
LENGTH = 8


def generator(*seed: int) -> np.random.Generator:
    """Returns the generator of a seed; neighbouring seeds are independent."""
    return np.random.default_rng(seed)


def labelled(step: int, rows: int) -> Rows:
    """Makes `x: f32[rows,12]` and the classes `y: i32[rows]` of a fixed linear teacher."""
    x = generator(1, step).standard_normal((rows, FEATURES), dtype=np.float32)
    teacher = generator(0).standard_normal((FEATURES, CLASSES), dtype=np.float32)
    return {"x": x, "y": np.argmax(x @ teacher, axis=1).astype(np.int32)}


def regression(step: int, rows: int) -> Rows:
    """Makes `x: f32[rows,12]` and a smooth target `y: f32[rows]`."""
    x = generator(2, step).standard_normal((rows, FEATURES), dtype=np.float32)
    teacher = generator(0).standard_normal(FEATURES, dtype=np.float32)
    return {"x": x, "y": np.tanh(x @ teacher).astype(np.float32)}


def images(step: int, rows: int) -> Rows:
    """Makes `image: f32[rows,8,8,1]` with a bright quarter, its index as `label: i32[rows]`."""
    random = generator(3, step)
    image = random.standard_normal((rows, 8, 8, 1), dtype=np.float32)
    label = random.integers(0, 4, rows).astype(np.int32)
    for row, quarter in enumerate(label):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        image[row, top : top + 4, left : left + 4] += 1.5
    return {"image": image, "label": label}


def sentences(step: int, rows: int) -> Rows:
    """Makes `tokens: i32[rows,8]` that count upwards, and an uneven `mask: bool[rows,8]`.

    Row 0 is the shortest, so a mean over the unmasked tokens is not the mean of the devices' means.
    """
    random = generator(4, step)
    start = random.integers(1, VOCABULARY, (rows, 1))
    stride = random.integers(1, 4, (rows, 1))
    tokens = (start + stride * np.arange(LENGTH)) % VOCABULARY
    lengths = 3 + (np.arange(rows) * (LENGTH - 2)) // rows
    mask = np.arange(LENGTH) < lengths[:, None]
    return {"tokens": np.where(mask, tokens, 0).astype(np.int32), "mask": mask}


def signals(step: int, rows: int) -> Rows:
    """Makes `x: f32[rows,8,3]` over time and the sign of each signal's mean as `y: i32[rows]`."""
    x = generator(5, step).standard_normal((rows, LENGTH, 3), dtype=np.float32)
    return {"x": x, "y": (x.mean(axis=(1, 2)) > 0).astype(np.int32)}


def bare(make: Callable[[int, int], Rows], name: str) -> Callable[[int, int], Array]:
    """Converts a maker of dicts to a maker of one of their arrays."""
    return lambda step, rows: make(step, rows)[name]
