"""Recurrent layers and conditional random fields against plain loops over each sequence."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid import layers
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

LENGTHS = [3, 1, 5]
RANDOM = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def drawn(*shape: int) -> Array:
    return RANDOM.normal(size=shape).astype("f4")


def set_value(name: str, value: Array) -> None:
    variable = fluid.global_scope().find_var(name)
    assert variable is not None
    variable.get_tensor().set(value, fluid.CPUPlace())


def run(
    build: Callable[[fluid.Variable], Any], width: int, values: dict[str, Array]
) -> tuple[list[Array], Array]:
    """Builds a net on sequences of rows, sets its parameters and runs it; also returns the rows."""
    rows = drawn(sum(LENGTHS), width)
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        x = layers.data("x", [width], lod_level=1)
        fetched = build(x)
        exe = fluid.Executor()
        exe.run(startup)
        for name, value in values.items():
            set_value(name, value)
        feed = {"x": fluid.create_lod_tensor(rows, [LENGTHS], fluid.CPUPlace())}
        made = exe.run(main, feed=feed, fetch_list=list(fetched), return_numpy=False)
        return [np.asarray(each) for each in made], rows


def each_sequence(rows: Array, step: Callable[[Any, Array], Any], start: Any, *, back: bool) -> Any:
    """Runs a step over each sequence by itself; returns its output for each row."""
    kept, ends = np.empty(len(rows), object), np.cumsum([0, *LENGTHS])
    for begin, end in pairwise(ends):
        state = start
        for at in reversed(range(begin, end)) if back else range(begin, end):
            state = step(state, rows[at])
            kept[at] = state[0]
    return np.stack(list(kept))


@pytest.mark.few(2)
@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("use_peepholes", [False, True])
def test_an_lstm_is_a_loop_over_each_sequence(*, is_reverse: bool, use_peepholes: bool) -> None:
    d = 2
    weight, bias = drawn(d, 4 * d), drawn(1, (7 if use_peepholes else 4) * d)

    def build(x: fluid.Variable) -> Any:
        return layers.dynamic_lstm(
            x, 4 * d, param_attr="w", bias_attr="b", use_peepholes=use_peepholes,
            is_reverse=is_reverse,
        )  # fmt: skip

    def step(state: tuple[Array, Array], row: Array) -> tuple[Array, Array]:
        hidden, cell = state
        c, i, f, o = np.split(row + hidden @ weight + bias[0, : 4 * d], 4)
        peep = np.split(bias[0, 4 * d :], 3) if use_peepholes else [np.zeros(d)] * 3
        gates = sigmoid(i + peep[0] * cell), sigmoid(f + peep[1] * cell)
        cell = gates[1] * cell + gates[0] * np.tanh(c)
        return sigmoid(o + peep[2] * cell) * np.tanh(cell), cell

    (hidden, _), rows = run(build, 4 * d, {"w": weight, "b": bias})
    wanted = each_sequence(rows, step, (np.zeros(d), np.zeros(d)), back=is_reverse)
    np.testing.assert_allclose(hidden, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("origin_mode", [False, True])
@pytest.mark.parametrize("is_reverse", [False, True])
def test_a_gru_is_a_loop_over_each_sequence(*, is_reverse: bool, origin_mode: bool) -> None:
    d = 2
    weight, bias = drawn(d, 3 * d), drawn(1, 3 * d)
    # One buffer holds the matrix of the gates, followed by that of the candidate.
    gates = weight.reshape(-1)[: 2 * d * d].reshape(d, 2 * d)
    candidate = weight.reshape(-1)[2 * d * d :].reshape(d, d)

    def build(x: fluid.Variable) -> Any:
        made = layers.dynamic_gru(
            x, d, param_attr="w", bias_attr="b", is_reverse=is_reverse, origin_mode=origin_mode
        )
        return [made]

    def step(state: tuple[Array], row: Array) -> tuple[Array]:
        (hidden,) = state
        row = row + bias[0]
        u, r = np.split(sigmoid(row[: 2 * d] + hidden @ gates), 2)
        new = np.tanh(row[2 * d :] + (r * hidden) @ candidate)
        return (u * hidden + (1 - u) * new if origin_mode else (1 - u) * hidden + u * new,)

    (hidden,), rows = run(build, 3 * d, {"w": weight, "b": bias})
    wanted = each_sequence(rows, step, (np.zeros(d),), back=is_reverse)
    np.testing.assert_allclose(hidden, wanted, rtol=1e-5, atol=1e-6)


def paths(rows: Array, transition: Array) -> tuple[list[tuple[int, ...]], Array]:
    """Returns every path of tags through a sequence, with its score."""
    found = list(product(range(rows.shape[1]), repeat=len(rows)))
    scores = [
        transition[0, tags[0]] + transition[1, tags[-1]]
        + sum(rows[at, tag] for at, tag in enumerate(tags))
        + sum(transition[2 + a, b] for a, b in pairwise(tags))
        for tags in found
    ]  # fmt: skip
    return found, np.asarray(scores)


def tagged(x: fluid.Variable) -> Any:
    label = layers.data("label", [1], dtype="int64", lod_level=1)
    attr = fluid.ParamAttr("crf")
    cost = layers.linear_chain_crf(x, label, attr)
    return cost, layers.crf_decoding(x, attr), layers.crf_decoding(x, attr, label)


def test_a_crf_scores_and_finds_paths_as_all_paths_together_do() -> None:
    tags = 3
    transition, rows = drawn(tags + 2, tags), drawn(sum(LENGTHS), tags)
    label = RANDOM.integers(0, tags, (sum(LENGTHS), 1))
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        fetched = list(tagged(layers.data("x", [tags], lod_level=1)))
        exe = fluid.Executor()
        exe.run(startup)
        set_value("crf", transition)
        feed = {"x": fluid.create_lod_tensor(rows, [LENGTHS], fluid.CPUPlace()),
                "label": fluid.create_lod_tensor(label, [LENGTHS], fluid.CPUPlace())}  # fmt: skip
        made = exe.run(main, feed=feed, fetch_list=fetched, return_numpy=False)
        cost, best, right = (np.asarray(each) for each in made)
    ends = np.cumsum([0, *LENGTHS])
    for number, (begin, end) in enumerate(pairwise(ends)):
        found, scores = paths(rows[begin:end], transition)
        own = scores[found.index(tuple(label[begin:end, 0]))]
        norm = np.log(np.exp(scores.astype("f8")).sum())
        np.testing.assert_allclose(cost[number, 0], norm - own, rtol=1e-4, atol=1e-5)
        assert tuple(best[begin:end, 0]) == found[int(scores.argmax())]
    np.testing.assert_array_equal(right[:, 0], best[:, 0] == label[:, 0])


def semantic_roles(*, labels: bool = True) -> Any:
    """Builds a small tagger of words and their contexts: embeddings, two LSTMs, a CRF."""
    words = [layers.data(n, [1], dtype="int64", lod_level=1) for n in ("word", "before", "mark")]
    rows = layers.sums([layers.fc(layers.embedding(word, [20, 8]), 16) for word in words])
    forward, _ = layers.dynamic_lstm(rows, 16)
    mixed = layers.sums([layers.fc(rows, 16), layers.fc(forward, 16)])
    backward, _ = layers.dynamic_lstm(mixed, 16, is_reverse=True)
    scores = layers.fc(backward, 4)
    target = layers.data("target", [1], dtype="int64", lod_level=1)
    attr = fluid.ParamAttr("crf")
    return layers.mean(layers.linear_chain_crf(scores, target, attr)), layers.crf_decoding(
        scores, attr
    )


@pytest.mark.grid
def test_a_tagger_of_several_fed_sequences_learns_its_tags() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        main.random_seed = startup.random_seed = 1
        loss, path = semantic_roles()
        fluid.optimizer.Adam(0.05).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup)
        words = [RANDOM.integers(0, 20, n).tolist() for n in (3, 5, 2, 4)]
        feed = {"word": words, "before": [[0, *w[:-1]] for w in words],
                "mark": [[1] * len(w) for w in words],
                "target": [[word % 4 for word in w] for w in words]}  # fmt: skip
        for _ in range(40):
            last = exe.run(main, feed=feed, fetch_list=[loss, path], return_numpy=False)
        found = np.asarray(last[1])[:, 0].tolist()
        assert found == [word % 4 for w in words for word in w]
        feed["target"] = [w[:1] for w in words]
        with pytest.raises(FeedError, match=r"'word' is fed sequences of lengths .* 'target' of"):
            exe.run(main, feed=feed, fetch_list=[loss])


def test_cosines_and_groups_are_those_of_numpy() -> None:
    x, y, image = drawn(4, 3), drawn(4, 3), drawn(2, 4, 3, 3)
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        a, b = layers.data("a", [3]), layers.data("b", [3])
        picture = layers.data("image", [4, 3, 3])
        fetched = [layers.cos_sim(a, b), layers.group_norm(picture, 2)]
        exe = fluid.Executor()
        exe.run(startup)
        feed = {"a": x, "b": y, "image": np.concatenate([image, image])}
        cosines, normal = exe.run(main, feed=feed, fetch_list=fetched)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    np.testing.assert_allclose(cosines[:, 0], (x * y).sum(1) / lengths, rtol=1e-5)
    groups = image.reshape(2, 2, -1)
    centred = groups - groups.mean(2, keepdims=True)
    wanted = centred / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normal[:2], wanted.reshape(image.shape), rtol=1e-4, atol=1e-5)


def test_a_width_that_is_not_four_parts_is_refused() -> None:
    with fresh():
        x = layers.data("x", [6], lod_level=1)
        with pytest.raises(ProgramError, match="dynamic_lstm: 'x' is 6 wide, where 4 parts make 8"):
            layers.dynamic_lstm(x, 8)


def test_rows_are_put_into_groups_of_five() -> None:
    with fresh():
        ids = layers.data("ids", [1], dtype="int64", lod_level=1)
        rows = layers.embedding(ids, [20, 8])
        assert layers.reshape(rows, [-1, 5, 8]).shape == (-1, 5, 8)
