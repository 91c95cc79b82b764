"""Sequences of unequal lengths: fed, pooled, trained on and fetched."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError, ProgramError, RaggedError
from jaxfleet.fluid import layers, nets
from jaxfleet.fluid.lowering.lod_values import fed_sequences
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

WORDS = 20


def classified(words: fluid.Variable, pool: str = "average") -> fluid.Variable:
    """Returns the two probabilities of a small net for sequences of words."""
    table = fluid.ParamAttr("table")
    rows = layers.embedding(words, [WORDS, 6], is_sparse=True, param_attr=table)
    hidden = layers.fc(rows, 8, act="tanh")
    return layers.fc(layers.sequence_pool(hidden, pool), 2, act="softmax")


def texts(count: int, seed: int) -> tuple[list[list[int]], np.ndarray]:
    """Draws sequences; the label of one is whether word 3 is in it."""
    random = np.random.default_rng(seed)
    found = [random.integers(4, WORDS, random.integers(1, 9)).tolist() for _ in range(count)]
    label = random.integers(0, 2, (count, 1))
    for words, (is_in,) in zip(found, label, strict=True):
        if is_in:
            words[random.integers(len(words))] = 3
    return found, label


@pytest.mark.grid
def test_a_net_on_sequences_trains() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        main.random_seed = startup.random_seed = 1
        words = layers.data("words", [1], dtype="int64", lod_level=1)
        label = layers.data("label", [1], dtype="int64")
        out = classified(words, "max")
        loss = layers.mean(layers.cross_entropy(out, label))
        share = layers.accuracy(out, label)
        fluid.optimizer.Adam(0.03).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup)
        for step in range(40):
            found, wanted = texts(16, step % 2)
            feed = {"words": found, "label": wanted}
            last = exe.run(main, feed=feed, fetch_list=[loss, share])
    assert float(last[0][0]) < 0.2
    assert float(last[1][0]) > 0.9
    assert main.global_block().var("words").shape == (-1, 1)
    types = [op.type for op in main.global_block().ops]
    assert types[:5] == ["lookup_table", "mul", "elementwise_add", "tanh", "sequence_pool"]
    assert "sequence_pool_grad" in types
    assert "lookup_table_grad" in types


def test_sequences_give_what_each_gives_alone() -> None:
    found, _ = texts(5, 9)
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        words = fluid.data("words", [None, 1], "int64", lod_level=1)
        out = classified(words)
        exe = fluid.Executor()
        exe.run(startup)
        together = exe.run(main, feed={"words": found}, fetch_list=[out])[0]
        alone = [exe.run(main, feed={"words": [one]}, fetch_list=[out])[0] for one in found]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-5)


def test_a_list_and_a_lod_tensor_are_fed_alike() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        rows = layers.data("rows", [2], lod_level=1)
        out = layers.sequence_pool(rows, "sum")
        exe = fluid.Executor()
        values = np.arange(10, dtype=np.float32).reshape(5, 2)
        made = fluid.create_lod_tensor(values, [[3, 0, 2]], fluid.CPUPlace())
        by_tensor = exe.run(main, feed={"rows": made}, fetch_list=[out])[0]
        parts = [values[:3], values[:0], values[3:]]
        by_list = exe.run(main, feed={"rows": parts}, fetch_list=[out])[0]
    wanted = [[6, 9], [0, 0], [14, 16]]
    np.testing.assert_array_equal(by_tensor, wanted)
    np.testing.assert_array_equal(by_list, wanted)


def test_rows_are_added_only_where_nothing_mixes_them() -> None:
    with fresh() as (main, _):
        rows = layers.data("rows", [2], lod_level=1)
        layers.sequence_pool(layers.fc(rows, 3, act="relu"), "sum")
        fed = fed_sequences(main, rows, [np.ones((3, 2)), np.ones((2, 2))])
        layers.mean(rows)
        exact = fed_sequences(main, rows, [np.ones((3, 2)), np.ones((2, 2))])
    assert fed["rows"].shape == (8, 2)
    assert exact["rows"].shape == (5, 2)
    assert fed["rows@LENGTHS"].tolist() == exact["rows@LENGTHS"].tolist() == [3, 2]


def test_what_mixes_rows_is_known_by_its_axes() -> None:
    cases: list[tuple[Callable[[Any], Any], bool]] = [
        (lambda x: layers.softmax(x, axis=-1), False),
        (lambda x: layers.softmax(x, axis=-2), True),
        (lambda x: layers.layer_norm(x, begin_norm_axis=1), False),
        (lambda x: layers.layer_norm(x, begin_norm_axis=0, scale=False, shift=False), True),
        (lambda x: layers.concat([x, x], axis=1), False),
        (lambda x: layers.concat([x, x], axis=0), True),
        (lambda x: layers.reshape(x, [0, 2, 1]), False),
        (lambda x: layers.reshape(x, [-1, 1]), True),
        (lambda x: layers.cumsum(x, axis=0), True),
    ]
    for mix, is_mixed in cases:
        with fresh() as (main, _):
            rows = layers.data("rows", [2], lod_level=1)
            mix(rows)
            fed = fed_sequences(main, rows, [np.ones((5, 2))])
        assert (len(fed["rows"]) == 5) is is_mixed


def test_a_mean_over_the_words_of_a_batch_is_over_the_words() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        rows = layers.data("rows", [1], lod_level=1)
        out = layers.mean(layers.scale(rows, 2.0))
        exe = fluid.Executor()
        for lengths in ([1, 2], [4, 1, 2]):
            parts = [np.full((n, 1), n, np.float32) for n in lengths]
            (made,) = exe.run(main, feed={"rows": parts}, fetch_list=[out])
            np.testing.assert_allclose(made, [2 * np.concatenate(parts).mean()], rtol=1e-6)


def test_sequences_are_fetched_with_their_lengths() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        rows = layers.data("rows", [1], lod_level=1)
        out = layers.relu(rows)
        exe = fluid.Executor()
        feed = {"rows": [np.ones((2, 1), np.float32), np.ones((1, 1), np.float32)]}
        (made,) = exe.run(main, feed=feed, fetch_list=[out], return_numpy=False)
        with pytest.raises(
            RaggedError, match="is sequences, whose lengths a numpy array does not tell"
        ):
            exe.run(main, feed=feed, fetch_list=[out])
    assert out.lod_level == 1
    assert isinstance(made, fluid.LoDTensor)
    assert made.recursive_sequence_lengths() == [[2, 1]]
    assert made.lod() == [[0, 2, 3]]
    assert made.shape() == [3, 1]


def test_other_layers_on_sequences() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        rows = layers.data("rows", [2], lod_level=1)
        one = layers.data("one", [3])
        shares = layers.sequence_softmax(layers.fc(rows, 1))
        wide = layers.sequence_expand(one, rows)
        made = [
            layers.sequence_pool(shares, "sum"),
            layers.sequence_last_step(wide),
            layers.sequence_first_step(wide),
            nets.sequence_conv_pool(rows, 4, 3),
        ]
        exe = fluid.Executor()
        exe.run(startup)
        feed: dict[str, Any] = {
            "rows": [np.ones((2, 2), np.float32), np.ones((3, 2), np.float32)],
            "one": np.arange(6, dtype=np.float32).reshape(2, 3),
        }
        sums, last, first, pooled = exe.run(main, feed=feed, fetch_list=made)
    np.testing.assert_allclose(sums, np.ones((2, 1)), rtol=1e-6)
    np.testing.assert_array_equal(last, feed["one"])
    np.testing.assert_array_equal(first, feed["one"])
    assert pooled.shape == (2, 4)


def test_what_is_no_sequences() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        rows, plain = layers.data("rows", [2], lod_level=1), layers.data("plain", [2])
        out = layers.sequence_pool(rows, "sum")
        with pytest.raises(ProgramError, match="'plain' is no sequences"):
            layers.sequence_pool(plain, "sum")
        with pytest.raises(ProgramError, match="there is no pool_type 'median'"):
            layers.sequence_pool(rows, "median")
        exe = fluid.Executor()

        def run(value: Any) -> None:
            exe.run(main, feed={"rows": value}, fetch_list=[out])

        with pytest.raises(RaggedError, match="fed ndarray without their lengths"):
            run(np.ones((3, 2), np.float32))
        with pytest.raises(FeedError, match=r"rows of shape \[3\], and declared \[2\]"):
            run([np.ones((2, 3), np.float32)])
        with pytest.raises(FeedError, match="is fed 2 levels of sequences"):
            run(fluid.create_lod_tensor(np.ones((3, 2), np.float32), [[1, 1], [1, 2]]))


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(AssertionError, match=r"have the lengths \[\[\d"):
        fluid.create_lod_tensor([[1, 2], [3]], [[1, 2]], fluid.CPUPlace())
    with pytest.raises(AssertionError, match="add up to 3, and there are 4 rows"):
        fluid.create_lod_tensor(np.ones((4, 1)), [[1, 2]], fluid.CPUPlace())
    with pytest.raises(TypeError, match="the data of a LoDTensor"):
        fluid.create_lod_tensor(3, [[1]], fluid.CPUPlace())
    made = fluid.create_lod_tensor([[1, 2], [3]], [[2, 1]], fluid.CPUPlace())
    assert np.asarray(made).tolist() == [[1], [2], [3]]
    made.set_lod([[0, 1, 3]])
    assert made.recursive_sequence_lengths() == [[1, 2]]
    drawn = fluid.create_random_int_lodtensor([[2, 3]], [1], fluid.CPUPlace(), 4, 6)
    assert drawn.shape() == [5, 1]
    assert set(np.asarray(drawn).ravel()) <= {4, 5, 6}


@pytest.mark.parametrize(
    ("lod", "why"),
    [
        ([[0, 1, 9]], "add up to 9, and there are 6 rows"),
        ([[0, 1, 4]], "add up to 4, and there are 6 rows"),
        ([[0, 4, 2, 6]], "are no offsets"),
        ([[1, 3, 6]], "are no offsets"),
        ([[]], "are no offsets"),
        ([[0, 3], [0, 2, 6]], "add up to 3, and the next level has 2"),
    ],
)
def test_offsets_that_are_none_are_refused(lod: list[list[int]], why: str) -> None:
    made = fluid.LoDTensor()
    made.set(np.arange(6.0).reshape(6, 1), fluid.CPUPlace())
    with pytest.raises(ValueError, match=why):
        made.set_lod(lod)
    assert made.lod() == []
    with pytest.raises(RuntimeError, match="are not all 0 or more"):
        made.set_recursive_sequence_lengths([[-1, 7]])


def test_rows_that_are_set_after_the_lengths_are_checked_when_they_are_fed() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        out = layers.sequence_pool(layers.data("rows", [1], lod_level=1), "sum")
        made = fluid.LoDTensor()
        made.set_lod([[0, 1, 4]])
        made.set(np.arange(6, dtype=np.float32).reshape(6, 1))
        assert not made.has_valid_recursive_sequence_lengths()
        with pytest.raises(
            RaggedError, match=r"'rows' is fed sequences: the lengths .* add up to 4"
        ):
            fluid.Executor().run(main, feed={"rows": made}, fetch_list=[out])


def test_as_many_labels_as_sequences() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        pooled = layers.sequence_pool(layers.data("rows", [1], lod_level=1), "sum")
        out = layers.elementwise_add(pooled, layers.data("label", [1]))
        feed = {"rows": [[[1.0]], [[2.0], [3.0]]], "label": np.ones((3, 1), np.float32)}
        what = "'rows' is fed 2 sequences, and 'label' is fed 3 rows"
        with pytest.raises(FeedError, match=what):
            fluid.Executor().run(main, feed=feed, fetch_list=[out])


def test_a_feeder_makes_sequences_of_samples() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        words = layers.data("words", [1], dtype="int64", lod_level=1)
        label = layers.data("label", [1], dtype="int64")
        out = layers.sequence_pool(layers.cast(words, "float32"), "sum")
        feed = fluid.DataFeeder([words, label], fluid.CPUPlace()).feed([([1, 2], 0), ([5], 1)])
        (made,) = fluid.Executor().run(main, feed=feed, fetch_list=[out])
    assert isinstance(feed["words"], fluid.LoDTensor)
    assert feed["words"].recursive_sequence_lengths() == [[2, 1]]
    assert made.tolist() == [[3.0], [5.0]]


def test_a_copy_and_a_saved_program_have_sequences_too() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        rows = layers.data("rows", [1], lod_level=1)
        out = layers.sequence_pool(layers.relu(rows), "max")
        feed = {"rows": [np.ones((2, 1), np.float32), np.zeros((3, 1), np.float32)]}
        saved = fluid.Program.parse_from_string(main.serialize_to_string())
        exe = fluid.Executor()
        for program in (main.clone(for_test=True), saved):
            (made,) = exe.run(program, feed=feed, fetch_list=[out.name])
            assert made.tolist() == [[1.0], [0.0]]


def test_what_is_remembered_of_a_program_goes_with_it() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        rows = layers.data("rows", [1], lod_level=1)
        out = layers.sequence_pool(rows, "sum")
        exe = fluid.Executor()
        exe.run(main, feed={"rows": [np.ones((2, 1), np.float32)]}, fetch_list=[out])
    gone = weakref.ref(main)
    del main, _, rows, out, exe
    gc.collect()
    assert gone() is None


_ROWS_PER_STEP = (3, 6, 2, 7)
_OF_FLUID = (5.951917, 6.001533, 11.850956, 4.687580)  # the losses of 1.8.5, step by step


@pytest.mark.grid
def test_words_in_groups_of_five_meet_the_words_that_they_belong_to() -> None:
    def table(name: str, seed: int, width: int = 8) -> fluid.ParamAttr:
        values = np.random.RandomState(seed).randn(20, width).astype("float32")
        initializer = fluid.initializer.NumpyArrayInitializer(values)
        return fluid.ParamAttr(name=name, initializer=initializer)

    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        word, true, others = (
            layers.data(name, [1], dtype="int64", lod_level=1) for name in ("w", "t", "n")
        )
        here = layers.embedding(word, [20, 8], is_sparse=True, param_attr=table("in", 3))
        there = layers.embedding(true, [20, 8], is_sparse=True, param_attr=table("out", 6))
        rows = layers.reshape(others, [-1, 1])
        far = layers.embedding(rows, [20, 8], is_sparse=True, param_attr=table("out", 6))
        fives = layers.reshape(far, [-1, 5, 8])
        near = layers.reduce_sum(layers.elementwise_mul(here, there), dim=1, keep_dim=True)
        away = layers.matmul(layers.reshape(here, [-1, 1, 8]), fives, transpose_y=True)
        bias = layers.embedding(rows, [20, 1], is_sparse=True, param_attr=table("bias", 4, 1))
        away = layers.elementwise_add(layers.reshape(away, [-1, 5]), layers.reshape(bias, [-1, 5]))
        ones = layers.fill_constant_batch_size_like(near, [-1, 1], "float32", 1.0)
        zeros = layers.fill_constant_batch_size_like(near, [-1, 5], "float32", 0.0)
        parts = [(near, ones), (away, zeros)]
        costs = [layers.sigmoid_cross_entropy_with_logits(x, y) for x, y in parts]
        cost = layers.elementwise_add(*(layers.reduce_sum(each, dim=1) for each in costs))
        loss = layers.reduce_mean(cost)
        fluid.optimizer.SGD(0.5).minimize(loss)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup)
        drawn = np.random.RandomState(3)
        losses = []
        for count in _ROWS_PER_STEP:
            sizes = {"w": 1, "t": 1, "n": 5}
            feed = {
                name: fluid.create_lod_tensor(
                    drawn.randint(0, 20, (count * of, 1)).astype("int64"), [[of] * count], None
                )
                for name, of in sizes.items()
            }
            losses.append(float(exe.run(main, feed, [loss])[0]))
    np.testing.assert_allclose(losses, _OF_FLUID, rtol=1e-6)
