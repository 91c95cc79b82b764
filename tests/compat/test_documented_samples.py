"""The documents' three samples of ParallelExecutor run under `paddle`'s names, on two CPU devices.

The samples request a GPU, which is a warning without one; so does the last test.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import jaxfleet.compat
from jaxfleet import fluid

DEVICES = 2


@pytest.fixture
def paddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yields `paddle`, with two devices and a new scope."""
    monkeypatch.setenv("CPU_NUM", str(DEVICES))
    jaxfleet.compat.install()
    with fluid.scope_guard(fluid.Scope()):
        yield sys.modules["paddle"]
    jaxfleet.compat.uninstall()


class Sample:
    """The common beginning of the samples: one hidden layer, and its mean as the loss."""

    def __init__(self, paddle: Any, *, trains: bool = True, use_cuda: bool = False) -> None:
        paddle.enable_static()
        place = paddle.CUDAPlace(0) if use_cuda else paddle.CPUPlace()
        exe = paddle.static.Executor(place)
        self.train_program = paddle.static.Program()
        startup_program = paddle.static.Program()
        with paddle.static.program_guard(self.train_program, startup_program):
            data = paddle.static.data(name="X", shape=[None, 1], dtype="float32")
            hidden = paddle.static.nn.fc(data, 10)
            self.loss = paddle.mean(hidden)
            self.test_program = paddle.static.default_main_program().clone(for_test=True)
            if trains:
                paddle.optimizer.SGD(learning_rate=0.01).minimize(self.loss)
        exe.run(startup_program)
        self.train_exe = paddle.static.ParallelExecutor(
            use_cuda=use_cuda, main_program=self.train_program, loss_name=self.loss.name
        )


def of_each(value: np.ndarray) -> list[float]:
    """Returns the losses of both devices."""
    assert value.shape == (DEVICES,)
    return [float(one) for one in value]


def test_an_executor_that_tests_has_the_parameters_of_the_one_that_trains(paddle: Any) -> None:
    sample = Sample(paddle)
    test_exe = paddle.static.ParallelExecutor(
        use_cuda=False, main_program=sample.test_program, share_vars_from=sample.train_exe
    )
    name = sample.loss.name
    (tested,) = test_exe.run(feed={"X": ones(10)}, fetch_list=[name])
    (trained,) = sample.train_exe.run(feed={"X": ones(10)}, fetch_list=[name])
    assert of_each(tested) == pytest.approx(of_each(trained))  # both before this step's update
    (after,) = test_exe.run(feed={"X": ones(10)}, fetch_list=[name])
    assert sum(of_each(after)) < sum(of_each(tested))  # the trained parameters are the tested ones


def test_a_feed_is_a_dict_for_all_devices_or_one_for_each(paddle: Any) -> None:
    sample = Sample(paddle)
    assert sample.train_exe.device_count == DEVICES
    x = np.arange(10, dtype="float32")[:, None]
    (shared,) = sample.train_exe.run(feed={"X": x}, fetch_list=[sample.loss.name])
    first, second = of_each(shared)
    assert first != second  # rows 0 to 4, and 5 to 9
    x2 = np.random.default_rng(0).random((9, 1)).astype("float32")
    (own,) = sample.train_exe.run(feed=[{"X": x}, {"X": x2}], fetch_list=[sample.loss.name])
    assert len(of_each(own)) == DEVICES


def test_what_runs_have_left_is_dropped(paddle: Any) -> None:
    sample = Sample(paddle, trains=False)
    (loss,) = sample.train_exe.run(feed={"X": ones(10)}, fetch_list=[sample.loss.name])
    is_dropped = sample.train_exe._need_create_local_exe_scopes  # noqa: SLF001
    assert not is_dropped()
    sample.train_exe.drop_local_exe_scopes()
    assert is_dropped()
    (again,) = sample.train_exe.run(feed={"X": ones(10)}, fetch_list=[sample.loss.name])
    assert of_each(again) == of_each(loss)


def test_without_a_gpu_a_sample_that_asks_for_one_runs_all_the_same(paddle: Any) -> None:
    with pytest.warns(UserWarning, match="a GPU is asked for and JAX has none here"):
        sample = Sample(paddle, use_cuda=True)
    (loss,) = sample.train_exe.run(feed={"X": ones(10)}, fetch_list=[sample.loss.name])
    assert len(of_each(loss)) == DEVICES


def ones(rows: int) -> np.ndarray:
    return np.ones((rows, 1), "float32")
