"""Loaders: generators of samples, read ahead by a thread, for loops of a script or a program."""

import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError
from jaxfleet.fluid import io, layers
from tests.fluid.nets import fresh

Sample = tuple[np.ndarray, np.ndarray]
WIDTH = 3


def samples(count: int = 10) -> Callable[[], Iterator[Sample]]:
    def read() -> Iterator[Sample]:
        for at in range(count):
            yield np.full(WIDTH, at, np.float32), np.full(1, -at, np.float32)

    return read


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name == "read ahead"]


def declared() -> list[fluid.Variable]:
    return [fluid.data("x", [None, WIDTH]), fluid.data("y", [None, 1])]


def firsts(feeds: Any) -> list[list[float]]:
    """Returns the first column of the feeds of 'x', batch by batch."""
    return [one["x"][:, 0].tolist() for (one,) in feeds]


@pytest.mark.parametrize("drop_last", [True, False])
def test_each_pass_gives_all_samples_in_batches(drop_last: bool) -> None:
    with fresh():
        loader = io.DataLoader.from_generator(declared(), capacity=2)
        loader.set_sample_generator(samples(), 4, drop_last, places=fluid.cpu_places(1))
    wanted = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]] + ([] if drop_last else [[8.0, 9.0]])
    assert firsts(loader()) == wanted
    assert firsts(loader) == wanted


def test_lists_of_samples_and_batches_are_read_too() -> None:
    lists = io.batch(samples(4), 2)
    with fresh():
        reader = io.PyReader(declared(), capacity=2, return_list=True)
    reader.decorate_sample_list_generator(lists, fluid.CPUPlace())
    found = [(x[:, 0].tolist(), y.shape) for ((x, y),) in reader()]
    assert found == [([0.0, 1.0], (2, 1)), ([2.0, 3.0], (2, 1))]
    reader.decorate_batch_generator(lambda: iter([[np.ones((2, WIDTH)), np.zeros((2, 1))]]))
    assert [x.shape for ((x, _),) in reader()] == [(2, WIDTH)]
    reader.decorate_batch_generator(lambda: iter([[np.ones((2, WIDTH))]]))
    with pytest.raises(FeedError, match="a batch has 1 arrays, and feed_list 2 variables"):
        next(iter(reader()))


def test_each_device_gets_a_batch_of_its_own() -> None:
    with fresh():
        loader = io.DataLoader.from_generator(declared(), capacity=2)
        loader.set_sample_generator(samples(10), 2, places=fluid.cpu_places(2))
    found = [[one["x"][:, 0].tolist() for one in feeds] for feeds in loader()]
    assert found == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]


def test_a_loop_that_is_left_leaves_no_thread() -> None:
    with fresh():
        loader = io.DataLoader.from_generator(declared(), capacity=1)
        loader.set_sample_generator(samples(10**6), 2)
    for feeds in loader():
        assert feeds[0]["x"].shape == (2, WIDTH)
        break


def test_an_error_of_the_generator_comes_with_its_traceback() -> None:
    def broken() -> Iterator[Sample]:
        yield from samples(2)()
        raise ZeroDivisionError("the third sample")

    with fresh():
        loader = io.DataLoader.from_generator(declared(), capacity=4)
        loader.set_sample_generator(broken, 1)
    with pytest.raises(ZeroDivisionError, match="the third sample") as caught:
        list(loader())
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def trained(reader: Any, main: fluid.Program, loss: fluid.Variable, exe: fluid.Executor) -> int:
    """Runs a pass; returns its number of steps."""
    reader.start()
    steps = 0
    try:
        while True:
            exe.run(main, fetch_list=[loss])
            steps += 1
    except fluid.core.EOFException:
        pass
    with pytest.raises(fluid.core.EOFException, match="have ended"):
        exe.run(main, fetch_list=[loss])
    reader.reset()
    return steps


def test_a_program_takes_batches_of_its_reader() -> None:
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        reader = layers.py_reader(4, [(-1, WIDTH), (-1, 1)], ["float32", "float32"], name="data")
        x, y = layers.read_file(layers.double_buffer(reader))
        loss = layers.mean(layers.square_error_cost(layers.fc(x, 1), y))
        test = main.clone(for_test=True)
        fluid.optimizer.SGD(0.001).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup)
        with pytest.raises(FeedError, match="come from a loader that was not started"):
            exe.run(main, fetch_list=[loss])
        reader.decorate_paddle_reader(io.batch(samples(), 4))
        assert [trained(reader, main, loss, exe) for _ in range(2)] == [3, 3]
        assert trained(reader, test, loss, exe) == 3
        fed = {x.name: np.ones((2, WIDTH), np.float32), y.name: np.ones((2, 1), np.float32)}
        assert np.isfinite(exe.run(main, feed=fed, fetch_list=[loss])[0]).all()


def test_a_compiled_program_takes_a_batch_for_each_device() -> None:
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        x, y = declared()
        reader = io.DataLoader.from_generator([x, y], capacity=4, iterable=False)
        total = layers.reduce_sum(x)
        exe, places = fluid.Executor(), fluid.cpu_places(2)
        loss = layers.mean(layers.square_error_cost(layers.fc(x, 1), y))
        exe.run(startup)
        compiled = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=places)
        reader.set_sample_generator(samples(10), 2)
        reader.start()
        sums = [exe.run(compiled, fetch_list=[total])[0].tolist() for _ in range(2)]
        assert sums == [[3.0, 15.0], [27.0, 39.0]]  # of the rows 0, 1 and 2, 3; then of 4 to 7
        with pytest.raises(fluid.core.EOFException):
            exe.run(compiled, fetch_list=[total])
        reader.reset()


def test_loaders_that_are_used_wrongly() -> None:
    with fresh():
        x, y = declared()
        mine = io.DataLoader.from_generator([x, y], capacity=2)
        programs = io.DataLoader.from_generator([x, y], capacity=2, iterable=False)
        with pytest.raises(TypeError, match="feed_list is of type NoneType"):
            io.DataLoader.from_generator(capacity=2)
        with pytest.raises(ValueError, match="with capacity 0"):
            io.DataLoader.from_generator([x], capacity=0)
        with pytest.raises(TypeError, match="what read_file reads is of type int"):
            layers.read_file(3)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(ValueError, match="2 shapes, 1 dtypes and 2 lod_levels"):
            layers.py_reader(2, [(-1, 1), (-1, 1)], ["float32"])
    with pytest.raises(AssertionError, match="has no generator"):
        iter(mine)
    with pytest.raises(AssertionError, match="iterable=False is iterated over"):
        iter(programs)
    with pytest.raises(AssertionError, match="is for a loader with iterable=False"):
        mine.start()
    programs.set_sample_generator(samples(), 2)
    programs.start()
    with pytest.raises(AssertionError, match="a loader is started that runs"):
        programs.start()
    programs.reset()
    with pytest.raises(NotImplementedError, match="a DataLoader of a dataset"):
        io.DataLoader([1, 2])
