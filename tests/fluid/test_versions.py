"""Executors drop cached state together with its program."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.fluid.framework.program import VersionCache
from tests.fluid.nets import fresh

X = np.ones((2, 3), np.float32)


def plain(exe: fluid.Executor, main: fluid.Program, out: fluid.Variable) -> None:
    exe.run(main, feed={"x": X}, fetch_list=[out])


def pruned(exe: fluid.Executor, main: fluid.Program, out: fluid.Variable) -> None:
    exe.run(main, feed={"x": X}, fetch_list=[out], use_prune=True)


def sequences(exe: fluid.Executor, main: fluid.Program, out: fluid.Variable) -> None:
    with fluid.program_guard(main):
        total = layers.sequence_pool(fluid.data("s", [None, 3], lod_level=1), "sum")
    exe.run(main, feed={"x": X, "s": [X, X]}, fetch_list=[out, total])


@pytest.mark.parametrize("run", [plain, pruned, sequences])
def test_an_executor_keeps_no_program_alive(
    run: Callable[[fluid.Executor, fluid.Program, fluid.Variable], None],
) -> None:
    exe = fluid.Executor()
    with fresh() as (main, _):
        out = layers.scale(fluid.data("x", [None, 3]), 2.0)
    run(exe, main, out)
    left = weakref.ref(main)
    del main, out
    gc.collect()
    assert left() is None


def test_what_is_kept_is_made_anew_for_a_program_that_has_changed() -> None:
    kept = VersionCache(lambda program: len(program.global_block().ops))
    with fresh() as (main, _):
        out = layers.scale(fluid.data("x", [None, 3]), 2.0)
        assert [kept.get(main), kept.get(main)] == [1, 1]
        layers.scale(out, 2.0)
        assert kept.get(main) == 2
