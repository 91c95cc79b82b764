"""Fit a line to medical data, in fluid's words: all that changed is the import.

    python examples/fluid/fit_a_line.py
    python examples/fluid/fit_a_line.py --mode parallel
    jaxfleet launch --servers 2 --trainers 2 --servers-run-script examples/fluid/fit_a_line.py \
        --mode pserver

Ten measurements of 442 diabetes patients, and how ill they were a year later, come with
scikit-learn. The last line compares what was learned with the least squares of the same rows: on
the 82 patients that were held out, both are wrong by about 59 points, and agree to within 1 %.
"""

import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from modes import arguments, own_rows, training
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from jaxfleet import fluid

Sample: TypeAlias = tuple[np.ndarray, np.ndarray]


def load() -> list[np.ndarray]:
    x, y = load_diabetes(return_X_y=True)
    x = x * np.sqrt(len(x))  # columns have length 1: now their spread is 1
    parts = train_test_split(x, y[:, None], test_size=82, random_state=0)
    return [part.astype("float32") for part in parts]


def reader_of(x: np.ndarray, y: np.ndarray) -> Callable[[], Iterator[Sample]]:
    def reader() -> Iterator[Sample]:
        yield from zip(x, y, strict=True)

    return reader


def error(found: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - y) ** 2)))


def least_squares(x: np.ndarray, y: np.ndarray, x_test: np.ndarray) -> np.ndarray:
    def with_one(rows: np.ndarray) -> np.ndarray:
        return np.column_stack([rows, np.ones(len(rows))])

    best, *_ = np.linalg.lstsq(with_one(x), y)
    found: np.ndarray = with_one(x_test) @ best
    return found


def main() -> None:
    args = arguments(epochs=30)
    x_train, x_test, y_train, y_test = load()
    fluid.default_main_program().random_seed = 1
    fluid.default_startup_program().random_seed = 1
    random.seed(1)  # for shuffling in the same order in every process

    x = fluid.layers.data(name="x", shape=[10], dtype="float32")
    y = fluid.layers.data(name="y", shape=[1], dtype="float32")
    y_predict = fluid.layers.fc(input=x, size=1, act=None)
    cost = fluid.layers.square_error_cost(input=y_predict, label=y)
    avg_cost = fluid.layers.mean(cost)
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.SGD(learning_rate=0.02).minimize(avg_cost)

    shuffled = fluid.io.shuffle(reader_of(x_train, y_train), buf_size=500)
    train_reader = fluid.io.batch(shuffled, batch_size=20)
    feeder = fluid.DataFeeder(feed_list=[x, y], place=fluid.CPUPlace())
    with training(args.mode, avg_cost) as step:
        for epoch in range(args.epochs):
            for rows in own_rows(args.mode, train_reader()):
                loss = step(feeder.feed(rows))
            print(f"epoch {epoch + 1}: loss {loss:.1f}", flush=True)

    exe = fluid.Executor(fluid.CPUPlace())
    (found,) = exe.run(test_program, feed={"x": x_test, "y": y_test}, fetch_list=[y_predict])
    best = error(least_squares(x_train, y_train, x_test), y_test)
    print(f"test error {error(found, y_test):.1f}, least squares {best:.1f}")


if __name__ == "__main__":
    main()
