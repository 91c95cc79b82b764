"""Small programs of Downpour jobs, and files to train on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.dataset.files import written

KEYS = 50
FAR = 2**40  # keys start beyond the integers of a device


def ctr(width: int = 4, *, data_norm: bool = False) -> tuple[fluid.Variable, fluid.Variable, Any]:
    """Builds a net of two lookups in one table; returns the loss, probabilities and feeds."""
    ids = fluid.data("ids", [None, 2], dtype="int64")
    words = fluid.data("words", [None, 1], dtype="int64", lod_level=1)
    click = fluid.data("click", [None, 1], dtype="int64")
    size = [10**12, width]
    rows = fluid.embedding(ids, size, is_sparse=True, is_distributed=True, param_attr="emb")
    of_words = layers.embedding(words, size, is_sparse=True, is_distributed=True, param_attr="emb")
    summed = layers.sequence_pool(of_words, "sum")
    x = layers.concat([layers.reshape(rows, [-1, 2 * width]), summed], axis=1)
    x = layers.data_norm(x, name="norm") if data_norm else x
    out = layers.fc(x, 2, act="softmax", param_attr="w", bias_attr="b")
    return layers.mean(layers.cross_entropy(out, click)), out, [ids, words, click]


def files(folder: Path, *counts: int, seed: int = 0) -> list[str]:
    """Writes samples whose click depends on a planted weight of each key."""
    drawn = np.random.default_rng(seed)
    weights = np.random.default_rng(7).standard_normal(KEYS) * 2
    found = []
    for number, count in enumerate(counts):
        samples = [sample(drawn, weights) for _ in range(count)]
        found.append(written(folder / f"part-{seed}-{number}", samples))
    return found


def sample(drawn: np.random.Generator, weights: np.ndarray) -> Sequence[Sequence[int]]:
    ids, words = drawn.integers(0, KEYS, 2), drawn.integers(0, KEYS, drawn.integers(1, 4))
    chance = 1 / (1 + np.exp(-weights[ids].sum() - weights[words].sum()))
    click = int(drawn.random() < chance)
    return [(FAR + ids).tolist(), (FAR + words).tolist(), [click]]


def dataset(fed: Any, paths: list[str], batch: int, kind: str = "QueueDataset") -> Any:
    """Returns a dataset of files for a program's feeds."""
    made = fluid.DatasetFactory().create_dataset(kind)
    made.set_batch_size(batch)
    made.set_thread(2)
    made.set_filelist(paths)
    made.set_use_var(fed)
    return made
