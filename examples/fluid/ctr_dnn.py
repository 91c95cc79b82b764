"""Guess clicks from 26 categories and 13 numbers, in fluid's words: CTR-DNN.

    python examples/fluid/ctr_dnn.py
    python examples/fluid/ctr_dnn.py --mode parallel
    jaxfleet launch --servers 2 --trainers 2 --servers-run-script examples/fluid/ctr_dnn.py \
        --mode pserver --table distributed

The embedding is one parameter of all (`--table dense`); or slices of it are on servers, and
trainers ask for the rows of a batch (`sparse`); or servers make rows when their ids are first seen,
of which there may be any number (`distributed`). In one process these are the same.

The clicks are drawn by a law that is planted here, so it is known how well anybody can do: the
last line is `AUC 0.85x of 0.875`, that of the net on fresh rows and that of the law itself; never
below 0.845.
"""

import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from modes import arguments, own_rows, training
from sklearn.metrics import roc_auc_score

from jaxfleet import fluid

SLOTS, NUMBERS, IDS_A_SLOT, WIDTH = 26, 13, 100, 8
BATCH_ROWS, TRAIN_ROWS, TEST_ROWS = 256, 100_000, 10_000
RATE, SGD_RATE = 2e-3, 10.0

Sample: TypeAlias = tuple[np.ndarray, np.ndarray, int]


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draws categories, numbers, the law's click probability, and clicks."""
    law, fresh = np.random.default_rng(0), np.random.default_rng(seed)
    taste, slope = law.normal(size=(SLOTS, IDS_A_SLOT)), law.normal(size=NUMBERS)
    ids = (fresh.zipf(1.2, size=(count, SLOTS)) - 1) % IDS_A_SLOT
    numbers = fresh.normal(size=(count, NUMBERS)).astype("float32")
    found = taste[np.arange(SLOTS), ids]
    score = 0.4 * found.sum(1) + 0.4 * found[:, 0] * found[:, 1] + 0.3 * numbers @ slope - 1
    probability = 1 / (1 + np.exp(-score))
    clicked = (fresh.random(count) < probability).astype("int64")
    return ids + IDS_A_SLOT * np.arange(SLOTS), numbers, probability, clicked


def reader_of(
    ids: np.ndarray, numbers: np.ndarray, y: np.ndarray
) -> Callable[[], Iterator[Sample]]:
    def reader() -> Iterator[Sample]:
        yield from zip(ids, numbers, y, strict=True)

    return reader


def ctr_dnn_model(ids: fluid.Variable, numbers: fluid.Variable, table: str) -> fluid.Variable:
    size = [SLOTS * IDS_A_SLOT, WIDTH]
    attr = fluid.ParamAttr(name="embedding", initializer=fluid.initializer.Normal(scale=0.05))
    if table == "distributed":  # its optimizer is always SGD
        attr.learning_rate = SGD_RATE / RATE
    rows = fluid.embedding(
        input=ids,
        size=size,
        is_sparse=table != "dense",
        is_distributed=table == "distributed",
        param_attr=attr,
    )
    embedded = fluid.layers.reshape(rows, [-1, SLOTS * WIDTH])
    hidden = fluid.layers.concat([embedded, numbers], axis=1)
    for width in (64, 32):
        hidden = fluid.layers.fc(input=hidden, size=width, act="relu")
    return fluid.layers.fc(input=hidden, size=2, act="softmax")


def main() -> None:
    args = arguments(epochs=2, tables=("dense", "sparse", "distributed"))
    fluid.default_main_program().random_seed = 1
    fluid.default_startup_program().random_seed = 1
    random.seed(1)

    ids = fluid.data(name="ids", shape=[None, SLOTS], dtype="int64")
    numbers = fluid.data(name="numbers", shape=[None, NUMBERS], dtype="float32")
    label = fluid.data(name="label", shape=[None, 1], dtype="int64")
    predict = ctr_dnn_model(ids, numbers, args.table)
    cost = fluid.layers.cross_entropy(input=predict, label=label)
    avg_cost = fluid.layers.mean(cost)
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.Adam(learning_rate=RATE).minimize(avg_cost)

    train_ids, train_numbers, _, clicked = draw(TRAIN_ROWS, seed=1)
    shuffled = fluid.io.shuffle(reader_of(train_ids, train_numbers, clicked), TRAIN_ROWS)
    train_reader = fluid.io.batch(shuffled, batch_size=BATCH_ROWS, drop_last=True)
    feeder = fluid.DataFeeder(feed_list=[ids, numbers, label], place=fluid.CPUPlace())
    served = None if args.table == "dense" else test_program  # tables of servers, to be tested
    with training(args.mode, avg_cost, served) as step:
        for epoch in range(args.epochs):
            losses = [step(feeder.feed(rows)) for rows in own_rows(args.mode, train_reader())]
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}", flush=True)

    exe = fluid.Executor(fluid.CPUPlace())
    test_ids, test_numbers, probability, clicked = draw(TEST_ROWS, seed=2)
    feed = {"ids": test_ids, "numbers": test_numbers, "label": clicked[:, None]}
    (found,) = exe.run(test_program, feed=feed, fetch_list=[predict])
    ceiling = roc_auc_score(clicked, probability)
    print(f"AUC {roc_auc_score(clicked, found[:, 1]):.3f} of {ceiling:.3f}")


if __name__ == "__main__":
    main()
