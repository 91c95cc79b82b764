"""Learn word vectors by guessing the fifth word from four, in fluid's words.

    python examples/fluid/word2vec.py
    python examples/fluid/word2vec.py --mode parallel
    jaxfleet launch --servers 2 --trainers 2 --servers-run-script examples/fluid/word2vec.py \
        --mode pserver

The text is Python's own help, `pydoc_data.topics` of the standard library: 79,000 words and signs,
of which the last tenth is held out. The last line says between how many words the model wavers
(its perplexity) on those, and between how many one does who knows how often each word comes:
about `perplexity 94, by frequency 184` with the text of Python 3.11, whose help differs a little
from that of 3.12.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import TypeAlias

import numpy as np
from modes import arguments, own_rows, training

from jaxfleet import fluid

WIDTH, HIDDEN, BATCH_ROWS, N = 32, 256, 128, 5
LEAST_COUNT = 10  # rarer words are mapped to the unknown one

Sample: TypeAlias = tuple[int, ...]


def load() -> tuple[np.ndarray, int]:
    text = "\n".join(topics[name] for name in sorted(topics))
    words = re.findall(r"[a-z]+|[.,;:()]", text.lower())
    counts = Counter(words)
    known = sorted(word for word, count in counts.items() if count >= LEAST_COUNT)
    numbers = {word: at + 1 for at, word in enumerate(known)}
    return np.array([numbers.get(word, 0) for word in words]), len(known) + 1


def reader_of(words: np.ndarray) -> Callable[[], Iterator[Sample]]:
    rows = np.lib.stride_tricks.sliding_window_view(words, N)

    def reader() -> Iterator[Sample]:
        yield from map(tuple, rows.tolist())

    return reader


def inference_program(words: list[fluid.Variable], vocabulary: int) -> fluid.Variable:
    embedded = [
        fluid.layers.embedding(
            input=word,
            size=[vocabulary, WIDTH],
            dtype="float32",
            is_sparse=False,
            param_attr=fluid.ParamAttr(name="shared_w"),
        )
        for word in words
    ]
    concat = fluid.layers.concat(input=embedded, axis=1)
    hidden = fluid.layers.fc(input=concat, size=HIDDEN, act="sigmoid")
    return fluid.layers.fc(input=hidden, size=vocabulary, act="softmax")


def perplexity_by_frequency(train: np.ndarray, test: np.ndarray, vocabulary: int) -> float:
    counts = np.bincount(train, minlength=vocabulary) + 1
    return float(np.exp(-np.log(counts / counts.sum())[test].mean()))


def main() -> None:
    args = arguments(epochs=4)
    words, vocabulary = load()
    train, test = words[: -len(words) // 10], words[-len(words) // 10 :]
    fluid.default_main_program().random_seed = 1
    fluid.default_startup_program().random_seed = 1
    random.seed(1)

    names = ["firstw", "secondw", "thirdw", "forthw", "nextw"]
    data = [fluid.layers.data(name=name, shape=[1], dtype="int64") for name in names]
    predict = inference_program(data[:-1], vocabulary)
    cost = fluid.layers.cross_entropy(input=predict, label=data[-1])
    avg_cost = fluid.layers.mean(cost)
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.Adam(learning_rate=0.002).minimize(avg_cost)

    shuffled = fluid.io.shuffle(reader_of(train), buf_size=len(train))
    train_reader = fluid.io.batch(shuffled, batch_size=BATCH_ROWS, drop_last=True)
    feeder = fluid.DataFeeder(feed_list=data, place=fluid.CPUPlace())
    with training(args.mode, avg_cost) as step:
        for epoch in range(args.epochs):
            losses = [step(feeder.feed(rows)) for rows in own_rows(args.mode, train_reader())]
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}", flush=True)

    exe = fluid.Executor(fluid.CPUPlace())
    feed = feeder.feed(list(reader_of(test)()))
    (loss,) = exe.run(test_program, feed=feed, fetch_list=[avg_cost])
    by_frequency = perplexity_by_frequency(train, test[N - 1 :], vocabulary)
    print(f"perplexity {np.exp(loss.item()):.0f}, by frequency {by_frequency:.0f}")


if __name__ == "__main__":
    main()
