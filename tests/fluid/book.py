"""Models of fluid's book, small, each with a drawn batch.

Every loss is a mean over samples, so a job whose trainers have equal shares of a batch gives the
result of one process on the whole batch. Batch normalization sees only the samples of one process:
there all get the same batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet import fluid
from jaxfleet.fluid import layers, nets

WORDS, LABELS, ROWS = 23, 5, 4


@dataclass(frozen=True)
class Model:
    """A model of the book.

    Attributes:
        build: builds the net with its optimizer; returns the loss.
        batch: draws feeds of `ROWS` samples.
        is_shared: trainers have shares of a batch; otherwise each has the whole.
    """

    build: Callable[[], fluid.Variable]
    batch: Callable[[], dict[str, Any]]
    is_shared: bool = True


def _drawn() -> np.random.Generator:
    return np.random.default_rng(5)


def _floats(*shape: int) -> np.ndarray:
    return _drawn().normal(size=(ROWS, *shape)).astype(np.float32)


def _ids(limit: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, limit, (ROWS, 1))


def _texts(limit: int, seed: int = 0) -> list[list[int]]:
    """Draws sequences in two halves with equal numbers of words, for equal shares."""
    random = np.random.default_rng(seed)
    return [random.integers(0, limit, length).tolist() for length in (3, 3, 5, 5)]


# --- fit a line --------------------------------------------------------------------------------


def fit_a_line() -> fluid.Variable:
    x, y = layers.data("x", [13]), layers.data("y", [1])
    loss = layers.mean(layers.square_error_cost(layers.fc(x, 1), y))
    fluid.optimizer.SGD(0.01).minimize(loss)
    return loss


# --- recognize digits --------------------------------------------------------------------------


def recognize_digits() -> fluid.Variable:
    image, label = layers.data("image", [1, 12, 12]), layers.data("label", [1], dtype="int64")
    first = nets.simple_img_conv_pool(image, 4, 3, 2, 2, act="relu")
    second = nets.simple_img_conv_pool(first, 6, 2, 2, 2, act="relu")
    out = layers.fc(second, 10, act="softmax")
    loss = layers.mean(layers.cross_entropy(out, label))
    fluid.optimizer.Adam(0.01).minimize(loss)
    return loss


# --- word2vec ----------------------------------------------------------------------------------

_GRAM = ("first", "second", "third", "fourth")


def word2vec() -> fluid.Variable:
    words = [layers.data(name, [1], dtype="int64") for name in _GRAM]
    following = layers.data("next", [1], dtype="int64")
    rows = [
        layers.embedding(word, [WORDS, 6], is_sparse=True, param_attr="shared") for word in words
    ]
    hidden = layers.fc(layers.concat(rows, axis=1), 8, act="sigmoid")
    out = layers.fc(hidden, WORDS, act="softmax")
    loss = layers.mean(layers.cross_entropy(out, following))
    fluid.optimizer.SGD(0.5).minimize(loss)
    return loss


def _grams() -> dict[str, Any]:
    return {name: _ids(WORDS, seed) for seed, name in enumerate((*_GRAM, "next"))}


# --- image classification ----------------------------------------------------------------------


def _normal(x: fluid.Variable, channels: int, stride: int, act: str | None) -> fluid.Variable:
    made = layers.conv2d(x, channels, 3, stride=stride, padding=1, bias_attr=False)
    return layers.batch_norm(made, act=act)


def _residual(x: fluid.Variable, channels: int, stride: int) -> fluid.Variable:
    made = _normal(_normal(x, channels, stride, "relu"), channels, 1, None)
    short = x if stride == 1 else _normal(x, channels, stride, None)
    return layers.elementwise_add(made, short, act="relu")


def image_classification() -> fluid.Variable:
    image, label = layers.data("image", [3, 8, 8]), layers.data("label", [1], dtype="int64")
    made = _residual(_residual(_normal(image, 4, 1, "relu"), 4, 1), 8, 2)
    pooled = layers.pool2d(made, 4, "avg", 1)
    out = layers.fc(pooled, 10, act="softmax")
    loss = layers.mean(layers.cross_entropy(out, label))
    fluid.optimizer.Adam(0.01).minimize(loss)
    return loss


# --- understand sentiment ----------------------------------------------------------------------


def understand_sentiment() -> fluid.Variable:
    words, label = (
        layers.data("words", [1], dtype="int64", lod_level=1),
        layers.data("y", [1], dtype="int64"),
    )
    rows = layers.embedding(words, [WORDS, 6], is_sparse=True)
    pooled = [
        nets.sequence_conv_pool(rows, 5, size, act="tanh", pool_type="sqrt") for size in (3, 4)
    ]
    out = layers.fc(pooled, 2, act="softmax")
    loss = layers.mean(layers.cross_entropy(out, label))
    fluid.optimizer.Adagrad(0.1).minimize(loss)
    return loss


# --- label semantic roles ----------------------------------------------------------------------

_CONTEXT = ("word", "before", "at", "after")


def label_semantic_roles() -> fluid.Variable:
    words = [layers.data(name, [1], dtype="int64", lod_level=1) for name in _CONTEXT]
    mark = layers.data("mark", [1], dtype="int64", lod_level=1)
    target = layers.data("target", [1], dtype="int64", lod_level=1)
    table = fluid.ParamAttr("words", trainable=False)
    rows = [layers.embedding(word, [WORDS, 6], param_attr=table) for word in words]
    rows.append(layers.embedding(mark, [2, 3], is_sparse=True))
    mixed = layers.sums([layers.fc(each, 8, act="tanh") for each in rows])
    kinds: dict[str, Any] = {"cell_activation": "sigmoid", "candidate_activation": "relu"}
    lstm, _ = layers.dynamic_lstm(mixed, 8, **kinds)
    again = layers.sums([layers.fc(mixed, 8, act="tanh"), layers.fc(lstm, 8, act="tanh")])
    back, _ = layers.dynamic_lstm(again, 8, is_reverse=True, **kinds)
    scores = layers.sums(
        [layers.fc(again, LABELS, act="tanh"), layers.fc(back, LABELS, act="tanh")]
    )
    attr = fluid.ParamAttr("transitions", learning_rate=2.0)
    loss = layers.mean(layers.linear_chain_crf(scores, target, attr))
    rate = layers.exponential_decay(0.1, decay_steps=2, decay_rate=0.5, staircase=True)
    fluid.optimizer.SGD(rate).minimize(loss)
    return loss


def _roles() -> dict[str, Any]:
    texts = {name: _texts(WORDS, seed) for seed, name in enumerate(_CONTEXT)}
    return {**texts, "mark": _texts(2, 8), "target": _texts(LABELS, 9)}


# --- recommender system ------------------------------------------------------------------------

_PERSON = {"user": 7, "gender": 2, "age": 4, "job": 5}


def recommender_system() -> fluid.Variable:
    person = []
    for name, limit in _PERSON.items():
        row = layers.embedding(layers.data(name, [1], dtype="int64"), [limit, 4], is_sparse=True)
        person.append(layers.fc(row, 4))
    user = layers.fc(layers.concat(person, axis=1), 8, act="tanh")
    film = layers.embedding(layers.data("film", [1], dtype="int64"), [9, 4], is_sparse=True)
    kinds = layers.data("kinds", [1], dtype="int64", lod_level=1)
    kind = layers.sequence_pool(layers.embedding(kinds, [6, 4], is_sparse=True), "sum")
    title = layers.embedding(layers.data("title", [1], dtype="int64", lod_level=1), [WORDS, 4])
    named = nets.sequence_conv_pool(title, 4, 3, act="tanh", pool_type="sum")
    movie = layers.fc(layers.concat([layers.fc(film, 4), kind, named], axis=1), 8, act="tanh")
    guess = layers.scale(layers.cos_sim(user, movie), 5.0)
    loss = layers.mean(layers.square_error_cost(guess, layers.data("score", [1])))
    fluid.optimizer.SGD(0.02).minimize(loss)
    return loss


def _ratings() -> dict[str, Any]:
    person = {name: _ids(limit, seed) for seed, (name, limit) in enumerate(_PERSON.items())}
    score = _ids(5, 6).astype(np.float32) + 1
    film = {"film": _ids(9, 5), "kinds": _texts(6, 7), "title": _texts(WORDS, 8)}
    return {**person, **film, "score": score}


MODELS = {
    "fit a line": Model(fit_a_line, lambda: {"x": _floats(13), "y": _floats(1)}),
    "recognize digits": Model(
        recognize_digits, lambda: {"image": _floats(1, 12, 12), "label": _ids(10)}
    ),
    "word2vec": Model(word2vec, _grams),
    "image classification": Model(
        image_classification,
        lambda: {"image": _floats(3, 8, 8), "label": _ids(10)},
        is_shared=False,
    ),
    "understand sentiment": Model(
        understand_sentiment, lambda: {"words": _texts(WORDS), "y": _ids(2)}
    ),
    "label semantic roles": Model(label_semantic_roles, _roles),
    "recommender system": Model(recommender_system, _ratings),
}
