"""`beam_search` and `beam_search_decode`, against fluid 1.8.5 and against a search in NumPy."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError, ProgramError, RaggedError
from jaxfleet.fluid import layers
from jaxfleet.fluid.executor import Scope
from tests.fluid.nets import fresh

END = 2
Sentences = list[list[tuple[list[int], list[float]]]]  # by source, the best first


def beams(rows: Any, dtype: str, *levels: list[int]) -> fluid.LoDTensor:
    return fluid.create_lod_tensor(np.asarray(rows, dtype).reshape(len(rows), -1), levels, None)


def run(feed: dict[str, Any], fetch: list[fluid.Variable]) -> list[Any]:
    program = fetch[0].block.program
    return fluid.Executor().run(program, feed=feed, fetch_list=fetch, return_numpy=False)


# Results of fluid 1.8.5: words, scores, parents, lengths of both levels.
STEPS = [
    pytest.param(
        ([3, 1, 5], [0.9, 0.8, 0.7], [[3, 4], [5, 6], [7, 8]],
         [[0.5, 0.4], [0.6, 0.3], [0.2, 0.1]], [[1, 2], [1, 1, 1]], 2, True),
        ([3, 4, 1, 7], [0.5, 0.4, 0.8, 0.2], [0, 0, 1, 2], [[1, 2], [2, 1, 1]]),
        id="a_beam_that_has_ended_goes_on_as_itself",
    ),
    pytest.param(
        ([1, 1, 5], [0.9, 0.8, 0.7], [[3, 4], [5, 6], [7, 8]],
         [[0.5, 0.4], [0.6, 0.3], [0.2, 0.1]], [[1, 1, 0], [1, 2]], 2, True),
        ([1, 7], [0.8, 0.2], [1, 2], [[1, 2, 0], [0, 1, 1]]),
        id="a_source_that_has_ended_is_left_without_rows",
    ),
    pytest.param(
        ([1, 1, 5], [0.9, 0.8, 0.7], None,
         [[0.5, 0.4], [0.6, 0.3], [0.2, 0.1]], [[2, 1], [1, 1, 1]], 2, False),
        ([0, 1], [-0.9094379544258118, -1.6025850772857666], [2, 2], [[2, 1], [0, 0, 2]]),
        id="probabilities_of_words_are_added_as_logarithms",
    ),
    pytest.param(
        ([1, 1], [0.9, 0.8], None, [[0.5, 0.4], [0.6, 0.3]], [[1, 1], [1, 1]], 2, False),
        ([], [], [], [[1, 1], [0, 0]]),
        id="all_sources_have_ended",
    ),
    pytest.param(
        ([3, 1, 5, 4], [-0.9, -0.2, -0.7, -1.0], [[3, 4, 0], [5, 6, 0], [7, 8, 1], [2, 3, 4]],
         [[-1.1, -1.5, -2.0], [-0.3, -0.4, -0.5], [-0.8, -0.9, -1.2], [-1.1, -1.2, -1.3]],
         [[1, 2], [2, 1, 1]], 3, True),
        ([3, 4, 1, 7, 8, 2], [-1.1, -1.5, -0.2, -0.8, -0.9, -1.1], [0, 0, 1, 2, 2, 3],
         [[2, 2], [2, 1, 2, 1]]),
        id="continuations_stand_with_their_prefixes",
    ),
    pytest.param(
        ([1, 1, 5, 1], [-0.9, -0.2, -0.7, -1.0], [[3, 4, 0], [5, 6, 0], [1, 8, 1], [2, 3, 4]],
         [[-1.1, -1.5, -2.0], [-0.3, -0.4, -0.5], [-0.8, -0.9, -1.2], [-1.1, -1.2, -1.3]],
         [[2, 1, 0], [1, 1, 2]], 3, True),
        ([1, 8, 1], [-0.8, -0.9, -1.0], [2, 2, 3], [[2, 2, 0], [0, 0, 2, 1]]),
        id="a_source_may_have_no_prefixes",
    ),
    pytest.param(
        ([3, 5], [-0.5, -0.5], [[3, 4], [5, 6]], [[-1.0, -2.0], [-1.0, -2.0]],
         [[1], [2]], 2, True),
        ([3, 5], [-1.0, -1.0], [0, 1], [[2], [1, 1]]),
        id="equal_scores",
    ),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("given", "wanted"), STEPS)
def test_a_step_selects_what_fluid_selects(given: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    before, totals, tokens, scores, levels, size, is_accumulated = given
    columns, feed = len(scores[0]), {}
    with fresh(), fluid.scope_guard(Scope()):
        pre_ids = layers.data("pre_ids", [1], dtype="int64", lod_level=2)
        pre_scores = layers.data("pre_scores", [1], lod_level=2)
        now = layers.data("scores", [columns], lod_level=2)
        ids = layers.data("ids", [columns], dtype="int64", lod_level=2) if tokens else None
        made = layers.beam_search(
            pre_ids, pre_scores, ids, now, size, 1,
            is_accumulated=is_accumulated, return_parent_idx=True,
        )  # fmt: skip
        feed = {
            "pre_ids": beams(before, "i8", *levels),
            "pre_scores": beams(totals, "f4", *levels),
            "scores": beams(scores, "f4", *levels),
        } | ({"ids": beams(tokens, "i8", *levels)} if tokens else {})
        words, best, parent, is_empty = run(feed, [*made, layers.is_empty(made[0])])
    assert np.asarray(words).ravel().tolist() == wanted[0]
    np.testing.assert_allclose(np.asarray(best).ravel(), wanted[1], rtol=1e-6)
    assert np.asarray(parent).ravel().tolist() == wanted[2]
    assert words.recursive_sequence_lengths() == best.recursive_sequence_lengths() == wanted[3]
    assert bool(np.asarray(is_empty)) == (not wanted[0])


# --- the decoder of the book's translation model -------------------------------------------------


def weights(seed: int, words: int, ends: float) -> dict[str, np.ndarray]:
    random = np.random.RandomState(seed)
    made = {"emb": random.randn(words, 4), "ws": random.randn(5, 5), "we": random.randn(4, 5),
            "b": random.randn(5), "wo": 2 * random.randn(5, words),
            "bo": random.randn(words)}  # fmt: skip
    made["bo"][END] += ends
    return {name: value.astype("f4") for name, value in made.items()} | {
        "init_state": random.randn(3, 5).astype("f4")
    }


def decoder(style: str, words: int, size: int, steps: int) -> list[fluid.Variable]:
    """Builds the decoder as the book does, or with parents, or with scores of all words."""
    state = layers.data("init_state", [5])
    first_ids = layers.data("init_ids", [1], dtype="int64", lod_level=2)
    first_scores = layers.data("init_scores", [1], lod_level=2)
    n, i = layers.fill_constant([1], "int64", steps), layers.zeros([1], "int64")
    states, ids_array, scores_array = map(layers.create_array, ("float32", "int64", "float32"))
    if style == "parents":
        state = layers.sequence_expand(state, first_ids)
    for x, array in ((state, states), (first_ids, ids_array), (first_scores, scores_array)):
        layers.array_write(x, i, array)
    go_on = layers.less_than(i, n)
    loop = layers.While(go_on)
    with loop.block():
        pre_ids, before = layers.array_read(ids_array, i), layers.array_read(states, i)
        pre_scores = layers.array_read(scores_array, i)
        if style != "parents":
            before = layers.sequence_expand(before, pre_scores)
        word = layers.embedding(pre_ids, [words, 4], param_attr="emb")
        state = layers.fc([before, word], 5, act="tanh", bias_attr="b",
                          param_attr=[fluid.ParamAttr("ws"), fluid.ParamAttr("we")])  # fmt: skip
        guessed = layers.fc(layers.lod_reset(state, pre_scores), words, act="softmax",
                            param_attr="wo", bias_attr="bo")  # fmt: skip
        if style == "all_words":
            ids, scores = layers.beam_search(
                pre_ids, pre_scores, None, guessed, size, END, is_accumulated=False
            )
        else:
            best, tokens = layers.topk(guessed, size)
            so_far = layers.reshape(pre_scores, [-1])
            total = layers.elementwise_add(layers.log(best), so_far, axis=0)
            ids, scores, parents = layers.beam_search(
                pre_ids, pre_scores, tokens, total, size, END, return_parent_idx=True
            )
        layers.increment(i)
        if style == "parents":
            state = layers.gather(state, parents)
        for x, array in ((state, states), (ids, ids_array), (scores, scores_array)):
            layers.array_write(x, i, array)
        may_go_on = layers.less_than(i, n)
        layers.logical_and(may_go_on, layers.logical_not(layers.is_empty(ids)), out=go_on)
    return [*layers.beam_search_decode(ids_array, scores_array, size, END), i]


def decode(style: str, given: dict[str, np.ndarray], size: int, steps: int) -> tuple[Any, Any, int]:
    with fresh() as (_, startup), fluid.scope_guard(Scope()):
        found = decoder(style, len(given["emb"]), size, steps)
        fluid.Executor().run(startup)
        for name, value in given.items():
            if (held := fluid.global_scope().find_var(name)) is not None:
                held.get_tensor().set(value, None)
        words, scores, turns = run(first_beams(given), found)
    return words, scores, int(np.asarray(turns)[0])


def first_beams(given: dict[str, np.ndarray]) -> dict[str, Any]:
    one = [1] * len(given["init_state"])
    zeros = [0] * len(one)
    return {"init_state": given["init_state"], "init_ids": beams(zeros, "i8", one, one),
            "init_scores": beams(zeros, "f4", one, one)}  # fmt: skip


def sentences(words: Any, scores: Any) -> Sentences:
    """Splits fetched values by their lengths."""
    counts, lengths = words.recursive_sequence_lengths()
    ends = np.cumsum(lengths)
    pairs = zip(np.split(np.asarray(words), ends), np.split(np.asarray(scores), ends), strict=True)
    rest = iter([(one.tolist(), points.tolist()) for one, points in pairs])
    return [[next(rest) for _ in range(count)] for count in counts]


def searched(given: dict[str, np.ndarray], size: int, steps: int) -> Sentences:
    """Searches with lists: each source by itself, until all of its beams have ended."""

    def follow(state: np.ndarray, word: int) -> tuple[np.ndarray, np.ndarray]:
        state = np.tanh(state @ given["ws"] + given["emb"][word] @ given["we"] + given["b"])
        raw = state @ given["wo"] + given["bo"]
        grown = np.exp(raw - raw.max())
        return state, np.log(grown / grown.sum())

    found = []
    for begun in given["init_state"]:
        kept: list[Any] = [([0], [0.0], begun)]
        for _ in range(steps):
            if all(words[-1] == END for words, _, _ in kept):
                break
            options = []
            for words, scores, state in kept:
                if words[-1] == END:
                    options.append((words, scores, state))
                    continue
                after, logs = follow(state, words[-1])
                options += [([*words, word], [*scores, scores[-1] + float(log)], after)
                            for word, log in enumerate(logs)]  # fmt: skip
            kept = sorted(options, key=lambda x: -x[1][-1])[:size]
        found.append([(words, scores) for words, scores, _ in kept])
    return found


@pytest.mark.grid
@pytest.mark.parametrize(
    ("style", "seed"), [("book", 7), *product(("book", "parents", "all_words"), range(3, 7))]
)
def test_the_decoder_finds_the_sentences_of_a_plain_search(style: str, seed: int) -> None:
    given = weights(seed, 9, 1.5)
    words, scores, _ = decode(style, given, 3, 6)
    made, wanted = sentences(words, scores), searched(given, 3, 6)
    assert [[one for one, _ in source] for source in made] == [
        [one for one, _ in source] for source in wanted
    ]
    for source, others in zip(made, wanted, strict=True):
        for (_, own), (_, other) in zip(source, others, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("style", ["parents", "book", "all_words"])
def test_the_decoder_finds_the_sentences_that_fluid_finds(style: str) -> None:
    # Sources end at steps 2 to 4, and the loop with them: recorded with fluid 1.8.5.
    words, scores, turns = decode(style, weights(7, 7, 1.5), 2, 6)
    assert words.recursive_sequence_lengths() == [[2, 2, 2], [2, 5, 2, 4, 2, 3]]
    assert np.asarray(words).tolist() == [0, 2, 0, 4, 3, 3, 2, 0, 2, 0, 0, 3, 2, 0, 2, 0, 6, 2]
    wanted = [0.0, -0.5661, 0.0, -1.0493, -1.4611, -1.6346, -1.6466, 0.0, -0.9262, 0.0, -0.7376,
              -0.9121, -0.9711, 0.0, -0.4272, 0.0, -1.0897, -1.1471]  # fmt: skip
    np.testing.assert_allclose(np.asarray(scores), wanted, atol=1e-4)
    assert turns == 5


@pytest.mark.grid
def test_a_saved_decoder_finds_the_same(tmp_path: Path) -> None:
    given = weights(7, 7, 1.5)
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        found, exe = decoder("book", 7, 2, 6), fluid.Executor()
        exe.run(startup)
        before = run(first_beams(given), found)
        names = ["init_state", "init_ids", "init_scores"]
        fluid.io.save_inference_model(str(tmp_path), names, found[:2], exe, main)
    with fluid.scope_guard(Scope()):
        program, names, targets = fluid.io.load_inference_model(str(tmp_path), exe)
        assert names == ["init_state", "init_ids", "init_scores"]
        after = exe.run(program, first_beams(given), targets, return_numpy=False)
    assert sentences(*after) == sentences(*before[:2])


# --- mistakes ------------------------------------------------------------------------------------


def searching(
    ids: fluid.Variable, scores: fluid.Variable, **more: Any
) -> tuple[fluid.Variable, fluid.Variable]:
    best, tokens = layers.topk(layers.fc(scores, 5), 2)
    return layers.beam_search(ids, scores, tokens, best, 2, 1, **more)


def refused_of_beams(ids: fluid.Variable, scores: fluid.Variable) -> Any:
    return layers.mean(searching(ids, scores)[1])


def overwritten(ids: fluid.Variable, scores: fluid.Variable) -> Any:
    layers.assign(searching(ids, scores)[0], ids)
    return ids


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (refused_of_beams, "mean takes all rows of '.*' together, and some of them are spare"),
        (overwritten, "assign overwrites 'ids', whose levels stay what they were"),
    ],
)
def test_what_beams_do_not_allow_is_refused(ask: Callable[..., Any], why: str) -> None:
    with fresh() as (_, startup), fluid.scope_guard(Scope()):
        found = ask(layers.data("ids", [1], dtype="int64", lod_level=2),
                    layers.data("scores", [1], lod_level=2))  # fmt: skip
        fluid.Executor().run(startup)
        feed = {"ids": beams([0], "i8", [1], [1]), "scores": beams([0.0], "f4", [1], [1])}
        with pytest.raises(ProgramError, match=why):
            run(feed, [found])


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda _, __, x: layers.beam_search(x, x, x, x, 2, 1), "has no two levels"),
        (lambda ids, scores, x: layers.beam_search(ids, scores, ids, x, 2, 1), "no two levels"),
        (lambda ids, scores, x: layers.beam_search(ids, x, ids, scores, 2, 1), "pre_scores has b"),
        (lambda ids, scores, ___: searching(ids, scores, level=1), "level is 1"),
        (lambda ids, scores, ___: layers.beam_search_decode(ids, scores, 2, 1), "is not an array"),
        (lambda _, scores, x: layers.sequence_expand(x, scores, ref_level=2), "no level 2"),
        (lambda _, __, x: layers.lod_reset(x, x), "'x' is no sequences"),
        (lambda _, __, x: layers.lod_reset(x, target_lod=[0, 2]), "not of 'target_lod'"),
        (lambda _, scores, ___: layers.sequence_pool(scores, "sum"), "'scores' is no sequences"),
    ],
)
def test_layers_say_what_beams_they_want(ask: Callable[..., Any], why: str) -> None:
    with fresh(), pytest.raises(ProgramError, match=why):
        ask(layers.data("ids", [1], dtype="int64", lod_level=2),
            layers.data("scores", [1], lod_level=2), layers.data("x", [1]))  # fmt: skip


def test_a_state_that_is_read_for_each_source_is_not_taken_for_one_of_each_beam() -> None:
    with fresh():
        ids = layers.data("ids", [1], dtype="int64", lod_level=2)
        i = layers.zeros([1], "int64")
        array = layers.array_write(layers.data("x", [1]), i)
        layers.fc(layers.array_read(array, i), 1)
        with pytest.raises(ProgramError, match="is to hold beams, and mul takes"):
            layers.array_write(layers.cast(ids, "float32"), i, array)


def test_beams_are_fed_with_two_levels_and_fetched_with_their_lengths() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        ids = layers.data("ids", [1], dtype="int64", lod_level=2)
        made = searching(ids, layers.data("scores", [1], lod_level=2))
        exe = fluid.Executor()
        exe.run(startup)
        one, two = beams([0], "i8", [1]), beams([0], "i8", [1], [1])
        scores = beams([0.0], "f4", [1], [1])
        for wrong in (one, np.zeros((1, 1), "i8")):
            with pytest.raises(RaggedError, match="'ids' has two levels"):
                exe.run(main, {"ids": wrong, "scores": scores}, made, return_numpy=False)
        other = beams([0, 0], "i8", [2], [1, 1])
        with pytest.raises(FeedError, match="'ids' is fed sequences of lengths"):
            exe.run(main, {"ids": other, "scores": scores}, made, return_numpy=False)
        with pytest.raises(RaggedError, match="return_numpy=False"):
            exe.run(main, {"ids": two, "scores": scores}, made)


def test_a_row_for_each_source_or_prefix_goes_to_its_rows() -> None:
    with fresh(), fluid.scope_guard(Scope()):
        y = layers.data("y", [1], lod_level=2)
        x, wide = layers.data("x", [1]), layers.data("wide", [1])
        by_source = layers.sequence_expand(x, y, ref_level=0)
        by_prefix = layers.sequence_expand(layers.concat([x, wide], axis=0), y)
        feed = {"x": np.array([[1.0], [2]], "f4"), "wide": np.array([[3.0], [4]], "f4"),
                "y": beams([0.0] * 5, "f4", [1, 2], [2, 0, 3])}  # fmt: skip
        made = run(feed, [by_source, by_prefix])
    assert [np.asarray(one).ravel().tolist() for one in made] == [[1, 1, 2, 2, 2], [1, 1, 3, 3, 3]]
    assert made[0].recursive_sequence_lengths() == [[1, 2], [2, 0, 3]]


def test_rows_are_divided_as_those_of_other_sequences() -> None:
    with fresh(), fluid.scope_guard(Scope()):
        x, y = layers.data("x", [6, 2], append_batch_size=False), layers.data("y", [1], lod_level=1)
        divided = layers.lod_reset(x, y)
        feed = {"x": np.arange(12, dtype="f4").reshape(6, 2), "y": beams([0.0] * 6, "f4", [4, 2])}
        whole, sums = run(feed, [divided, layers.sequence_pool(divided, "sum")])
    assert whole.recursive_sequence_lengths() == [[4, 2]]
    assert np.asarray(sums).tolist() == [[12, 16], [18, 20]]
