"""Valid feeds other than arrays of exactly the declared shape."""

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError
from tests.fluid.nets import fresh

IMAGE = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def test_one_sample_is_fed_without_its_batch_axis() -> None:
    with fresh() as (main, _):
        image = fluid.layers.data("image", [3, 4])
        loss = fluid.layers.reduce_mean(fluid.layers.relu(image))
    tensor = fluid.LoDTensor()
    tensor.set(IMAGE, fluid.CPUPlace())
    exe = fluid.Executor(fluid.CPUPlace())
    build = fluid.BuildStrategy()
    build.enable_inplace = True
    compiled = fluid.CompiledProgram(main).with_data_parallel(
        loss.name, build_strategy=build, places=[fluid.CPUPlace()]
    )
    for fed in (IMAGE, IMAGE[None], tensor):
        for program in (main, compiled):
            (found,) = exe.run(program, feed=[{"image": fed}], fetch_list=[loss])
            assert float(found) == pytest.approx(np.maximum(IMAGE, 0).mean())
    np.testing.assert_array_equal(np.array(tensor), IMAGE)


def test_rows_that_are_declared_by_fluid_data_need_their_axis() -> None:
    with fresh() as (main, _):
        out = fluid.layers.relu(fluid.data("image", [None, 3, 4]))
    with pytest.raises(FeedError, match=r"an array \[3, 4\], and declared \[-1, 3, 4\]"):
        fluid.Executor().run(main, feed={"image": IMAGE}, fetch_list=[out])
