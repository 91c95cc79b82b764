"""`var.desc` and `op.desc`, and the properties by which scripts select variables."""

from pathlib import Path

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import core, io
from tests.fluid.nets import fresh

_LEFT_OUT = ("@GRAD", ".trainer_", ".block", "tmp_")


def is_saved(var: fluid.Variable) -> bool:
    """The rule of fluid's dist_save_load."""
    kinds = core.VarDesc.VarType
    if var.desc.type() in {kinds.FEED_MINIBATCH, kinds.FETCH_LIST, kinds.RAW}:
        return False
    return not any(part in var.name for part in _LEFT_OUT) and var.persistable


def test_variables_are_loaded_by_a_rule_of_their_descriptions(tmp_path: Path) -> None:
    with fresh() as (main, startup):
        x = fluid.layers.data("x", [3])
        loss = fluid.layers.mean(fluid.layers.fc(x, 1, param_attr="w", bias_attr="b"))
        fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
    exe, first, second = fluid.Executor(), fluid.Scope(), fluid.Scope()
    feed = {"x": np.ones((2, 3), np.float32)}
    with fluid.scope_guard(first):
        exe.run(startup)
        exe.run(main, feed=feed, fetch_list=[loss])
        io.save_persistables(exe, str(tmp_path), main)
        wanted = exe.run(main, feed=feed, fetch_list=[loss])
    with fluid.scope_guard(second):
        exe.run(startup)
        io.load_vars(exe, str(tmp_path), main, predicate=is_saved, filename=None)
        found = exe.run(main, feed=feed, fetch_list=[loss])
    assert float(found[0]) == float(wanted[0])


def test_a_description_says_what_its_variable_is_and_sets_it() -> None:
    with fresh() as (main, _):
        x = fluid.data("x", [None, 3], lod_level=1)
        fluid.layers.scale(x, 2.0)
    desc = x.desc
    assert (desc.name(), desc.dtype(), desc.shape()) == ("x", "float32", [-1, 3])
    assert (desc.type(), desc.lod_level()) == (core.VarDesc.VarType.LOD_TENSOR, 1)
    assert (desc.persistable(), desc.need_check_feed()) == (False, True)
    version = main.version
    desc.set_persistable(True)
    desc.set_shape([4, 3])
    desc.set_dtype("float64")
    desc.set_type(core.VarDesc.VarType.SELECTED_ROWS)
    assert (x.persistable, x.shape, x.dtype, x.type) == (True, (4, 3), "float64", "selected_rows")
    assert main.version == version + 4


def test_a_description_says_what_its_operator_is() -> None:
    with fresh() as (main, _):
        out = fluid.layers.scale(fluid.data("x", [None, 3]), 2.0)
    (op,) = main.global_block().ops
    assert op.desc.type() == "scale"
    assert (op.desc.input("X"), op.desc.output("Out")) == (["x"], [out.name])
    assert (op.desc.input_names(), op.desc.output_names()) == (["X"], ["Out"])
    assert (op.desc.input_arg_names(), op.desc.output_arg_names()) == (["x"], [out.name])
    assert op.desc.attr("scale") == pytest.approx(2.0)
    op.desc.set_attr("scale", 3.0)
    assert op.attr("scale") == 3.0
    assert op.desc.has_attr("scale")
    assert "scale" in op.desc.attr_names()
