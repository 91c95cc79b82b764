"""The number of devices that the CPU provides."""

import os

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import AssertedError, FeedError
from tests.fluid.nets import fresh


def test_cpu_num_is_set_to_one_where_a_script_needs_it_and_has_not_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CPU_NUM", "3")
    assert len(fluid.cpu_places()) == 3
    monkeypatch.delenv("CPU_NUM")
    assert len(fluid.cpu_places(2)) == 2
    assert "CPU_NUM" not in os.environ
    with fresh() as (main, _):
        fluid.layers.fill_constant([1], "float32", 1.0)
        made = fluid.ParallelExecutor(use_cuda=False, main_program=main)
    assert made.device_count == 1
    assert os.environ["CPU_NUM"] == "1"


def test_a_list_feed_for_too_few_devices_names_cpu_num(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = [{"x": np.ones((2, 1), np.float32)}] * 2
    with fresh() as (main, _):
        out = fluid.layers.scale(fluid.data("x", [None, 1]), 2.0)
        monkeypatch.setenv("CPU_NUM", "1")
        with pytest.raises(AssertedError, match="2 feeds are given") as caught:
            fluid.Executor().run(main, feed=feed, fetch_list=[out])
        assert "CPU_NUM=2" in "".join(caught.value.__notes__)
        monkeypatch.setenv("CPU_NUM", "2")
        made = fluid.ParallelExecutor(use_cuda=False, main_program=main)
        with pytest.raises(FeedError, match="3 dicts for 2 devices") as refused:
            made.run([out], feed=[*feed, feed[0]])
        assert "CPU_NUM=3" in "".join(refused.value.__notes__)


def test_a_place_of_either_kind_says_which_it_is() -> None:
    place = fluid.core.Place()
    with pytest.raises(AssertionError, match="was not set"):
        place._type()
    place.set_place(fluid.CUDAPlace(3))
    assert (place.is_gpu_place(), place.is_cpu_place(), place.gpu_device_id()) == (True, False, 3)
    assert place._type() == fluid.CUDAPlace(0)._type() != fluid.CPUPlace()._type()
    place.set_place(fluid.CPUPlace())
    assert place._equals(fluid.CPUPlace())
    with pytest.raises(AssertionError, match="no GPU"):
        place.gpu_device_id()
