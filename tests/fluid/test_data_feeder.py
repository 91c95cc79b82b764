"""Samples become arrays of the declared shapes and dtypes; mismatches are named."""

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError
from jaxfleet.fluid import layers, readers
from tests.fluid.nets import fresh

BATCH = [([float(row)] * 4, row) for row in range(3)]


def feeder() -> fluid.DataFeeder:
    image = layers.data("image", [2, 2])
    layers.data("label", [1], dtype="int64")
    return fluid.DataFeeder([image, "label"], fluid.CPUPlace())


def test_a_batch_has_the_declared_shapes_and_dtypes() -> None:
    with fresh():
        fed = feeder().feed(BATCH)
    arrays = {name: np.asarray(x) for name, x in fed.items()}
    assert {name: (x.shape, x.dtype.name) for name, x in arrays.items()} == {
        "image": ((3, 2, 2), "float32"),
        "label": ((3, 1), "int64"),
    }
    assert arrays["label"].tolist() == [[0], [1], [2]]


def test_what_is_fed_is_what_a_program_takes() -> None:
    with fresh() as (main, _), fluid.scope_guard(fluid.Scope()):
        made = feeder()
        block = main.global_block()
        total = layers.reduce_sum(block.var("image"))
        (value,) = fluid.Executor().run(main, feed=made.feed(BATCH), fetch_list=[total])
    assert value.tolist() == [12.0]


def test_samples_may_be_arrays_already() -> None:
    with fresh():
        fed = feeder().feed([(np.zeros((2, 2)), np.array([7]))])
    assert np.shape(fed["image"]) == (1, 2, 2)
    assert np.array(fed["label"]).tolist() == [[7]]


def test_no_samples_are_an_empty_batch() -> None:
    with fresh():
        fed = feeder().feed([])
    assert {name: np.shape(x) for name, x in fed.items()} == {"image": (0, 2, 2), "label": (0, 1)}


def test_each_device_is_fed_its_own_batch() -> None:
    with fresh():
        made = feeder()
        fed = list(made.feed_parallel([BATCH, BATCH[:1]], num_places=2))
        assert [len(np.asarray(x["image"])) for x in fed] == [3, 1]
        with pytest.raises(ValueError, match="a mini-batch for each of 3 devices, not 2"):
            list(made.feed_parallel([BATCH, BATCH], num_places=3))


def test_as_many_devices_as_cpu_num_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    with fresh():
        assert len(list(feeder().feed_parallel([BATCH, BATCH]))) == 2


def test_a_reader_of_batches_becomes_one_of_feeds() -> None:
    with fresh():
        made = feeder()
        reader = readers.batch(lambda: iter(BATCH), 1)
        assert [np.array(fed["label"]).item() for fed in made.decorate_reader(reader, False)()] == [
            0,
            1,
            2,
        ]
        paired = made.decorate_reader(reader, True, num_places=2)
        for _ in range(2):  # a reader is called once a pass
            found = [[np.array(fed["label"]).item() for fed in feeds] for feeds in paired()]
            assert found == [[0, 1]]
        strict = made.decorate_reader(reader, True, 2, drop_last=False)
        with pytest.raises(ValueError, match="1 batches are left for 2 devices"):
            list(strict())


def test_sequences_of_any_lengths_are_fed_one_after_the_other() -> None:
    with fresh() as (main, _), fluid.scope_guard(fluid.Scope()):
        words = layers.data("words", [1], dtype="int64", lod_level=1)
        made = fluid.DataFeeder([words, layers.data("label", [1])], fluid.CPUPlace())
        fed = made.feed([([3, 1], 0.0), ([4, 1, 5], 1.0), ([], 2.0)])
        last = layers.sequence_pool(layers.cast(words, "float32"), "sum")
        (sums,) = fluid.Executor().run(main, feed=fed, fetch_list=[last])
    assert np.array(fed["words"]).tolist() == [[3], [1], [4], [1], [5]]
    assert isinstance(fed["words"], fluid.LoDTensor)
    assert fed["words"].recursive_sequence_lengths() == [[2, 3, 0]]
    assert sums.tolist() == [[4.0], [10.0], [0.0]]


def test_what_does_not_fit() -> None:
    with fresh():
        made = feeder()
        with pytest.raises(AssertionError, match="a sample has 1 fields, and feed_list"):
            made.feed([([0.0] * 4,)])
        with pytest.raises(FeedError, match=r"samples of 'image' are .* cannot be reshaped"):
            made.feed([([0.0] * 5, 1)])
        with pytest.raises(ValueError, match=r"samples of 'image' are .*, and declared"):
            made.feed([(np.zeros((2, 3)), 1)])
        with pytest.raises(FeedError, match="samples of 'image' differ in shape") as caught:
            made.feed([([0.0] * 4, 1), ([0.0] * 3, 1)])
        assert "test_data_feeder.py" in "".join(caught.value.__notes__)
        for wrong in ("four", [[1.0], [2.0, 3.0]]):
            with pytest.raises(FeedError, match="a sample of 'image' is no array of float32"):
                made.feed([(wrong, 1)])
        with pytest.raises(TypeError, match="a member of feed_list is of type int, not Variable"):
            fluid.DataFeeder([3], fluid.CPUPlace())  # type: ignore[list-item]
        with pytest.raises(ValueError, match="block 0 has no variable 'labels'"):
            fluid.DataFeeder(["labels"], fluid.CPUPlace())
        with pytest.raises(TypeError, match=r"feed_list is of type \w+, not list or tuple"):
            fluid.DataFeeder("label", fluid.CPUPlace())
