"""Arguments that are not numbers, not lists, or too many: errors name argument and line."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh


def minimized(make: Callable[[], Any]) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        loss = layers.mean(layers.fc(fluid.data("x", [None, 2]), 1))
        make().minimize(loss)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fluid.optimizer.Adam(beta1=None), "'beta1' of AdamOptimizer is of type NoneType"),  # type: ignore[arg-type]
        (lambda: fluid.optimizer.Momentum(0.1, "a"), "'mu' of MomentumOptimizer is of type str"),  # type: ignore[arg-type]
        (lambda: fluid.clip.GradientClipByNorm("a"), "'clip_norm' of a gradient clip is of type"),  # type: ignore[arg-type]
        (lambda: fluid.clip.GradientClipByValue([1]), "'max' of a gradient clip is of type list"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError, match=says) as caught:
        minimized(make)
    assert "test_small_mistakes.py" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda _: layers.concat([]), "'input' of concat is an empty list"),
        (lambda x: layers.topk(x, 4), "topk of 4 elements, and a row of 'x' has 3"),
        (lambda x: layers.batch_norm(layers.reduce_sum(x, 1)), "2 to 5 axes"),
    ],
)
def test_what_a_layer_cannot_take_is_refused(layer: Callable[[Any], Any], says: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 3])
        with pytest.raises(ValueError, match=says) as caught:
            layer(x)
    assert "test_small_mistakes.py" in "".join(caught.value.__notes__)


def test_a_rank_that_trains_the_program_of_one_process_is_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "jaxfleet.fluid.lowering.program_cache.joined", lambda: SimpleNamespace(rank=1, size=2)
    )
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        loss = layers.mean(layers.fc(fluid.data("x", [None, 2]), 1, param_attr="w"))
        test = main.clone(for_test=True)
        fluid.optimizer.SGD(0.1).minimize(loss)
    feed, exe = {"x": np.ones((1, 2), np.float32)}, fluid.Executor()
    with fluid.scope_guard(fluid.Scope()), warnings.catch_warnings():
        warnings.simplefilter("error")  # neither the startup program nor a test updates
        exe.run(startup)
        exe.run(test, feed=feed, fetch_list=[loss.name])
        alone = "this is rank 1 of 2, .* by this process's rows alone: run fleet.main_program"
        with pytest.warns(UserWarning, match=alone) as said:
            exe.run(main, feed=feed)
        exe.run(main, feed=feed)  # a single warning
    assert [each.filename for each in said] == [__file__]


def test_a_program_of_nobody_elses_is_warned_of_where_a_launch_started_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:6170,127.0.0.1:6171")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        loss = layers.mean(layers.fc(fluid.data("x", [None, 2]), 1, param_attr="w"))
        fluid.optimizer.SGD(0.1).minimize(loss)
    feed, exe = {"x": np.ones((2, 2), np.float32)}, fluid.Executor()
    apart = "this is rank 1 of 2, .* updates '.*' by this process's rows alone: make it by the coll"
    with fluid.scope_guard(fluid.Scope()):
        exe.run(startup)
        with pytest.warns(UserWarning, match=apart):
            exe.run(main, feed=feed)
        parallel = fluid.CompiledProgram(main)
        parallel.with_data_parallel(loss.name, places=fluid.cpu_places(2))
        with pytest.warns(UserWarning, match=apart):
            exe.run(parallel, feed=feed)
        monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", "127.0.0.1:6174")
        exe.run(main, feed=feed, fetch_list=[loss])  # allowed for a trainer of servers


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda _: layers.io.ListenAndServ("127.0.0.1:0", ["X"]), "layers.io.ListenAndServ: serve"),
        (lambda x: layers.io.Send("127.0.0.1:6174", [x]), "layers.io.Send: servers here serve"),
        (lambda x: layers._pull_box_sparse(x, size=2), "_pull_box_sparse: the tables of BoxPS"),
        (lambda x: layers.io.Recv("127.0.0.1:6174", [x]), "layers.io.Recv: servers here serve"),
        (layers.control_flow.lod_rank_table, "lod_rank_table: sequences are not sorted"),
        (layers.control_flow.max_sequence_len, "max_sequence_len: sequences"),
        (lambda x: layers.control_flow.lod_tensor_to_array(x, x), "lod_tensor_to_array: seq"),
        (lambda x: layers.control_flow.array_to_lod_tensor(x, x), "array_to_lod_tensor: seq"),
        (lambda x: layers.control_flow.shrink_memory(x, x, x), "shrink_memory: sequences"),
        (lambda x: layers.reorder_lod_tensor_by_rank(x, x), "reorder_lod_tensor_by_rank: seq"),
    ],
)
def test_layers_that_are_not_here_are_refused_by_name(ask: Callable[[Any], Any], why: str) -> None:
    with fresh(), pytest.raises(NotImplementedError, match=why) as caught:
        ask(layers.data("x", [2]))
    assert "hint: " in str(caught.value.__notes__)


def test_a_layer_that_is_missing_is_an_attribute_error_that_says_where_to_look() -> None:
    assert not hasattr(layers, "yolov3_loss")
    with pytest.raises(AttributeError, match=r"'yolov3_loss'; docs/fluid-differences\.md lists"):
        layers.yolov3_loss  # noqa: B018  # asked for, not used
