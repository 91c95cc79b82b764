"""Blocks, operators and variables: their queries and edits."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import AssertedError
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh

VarType = fluid.core.VarDesc.VarType


def test_a_renamed_variable_is_renamed_in_every_operator_but_not_in_roles() -> None:
    with fresh() as (main, _):
        loss = layers.mean(layers.fc(layers.data("x", [4]), 1, param_attr="w", bias_attr=False))
        fluid.optimizer.SGD(0.1).minimize(loss)
    block = main.global_block()
    renamed = block._rename_var("w@GRAD", "w@GRAD.trainer_0")
    assert renamed is block.var("w@GRAD.trainer_0")
    maker = renamed.op
    assert maker is not None
    assert maker.type == "sgd" or "w@GRAD.trainer_0" in maker.output_arg_names
    by_type = {op.type: op for op in block.ops}
    assert by_type["sgd"].input("Grad") == ["w@GRAD.trainer_0"]
    assert by_type["mul_grad"].output("Y@GRAD") == ["w@GRAD.trainer_0"]
    assert by_type["mul_grad"].attr("op_role_var") == ["w", "w@GRAD"]
    assert not block.has_var("w@GRAD")
    with pytest.raises(ValueError, match="block 0 has no variable 'w@GRAD'"):
        block._rename_var("w@GRAD", "v")
    with pytest.raises(ValueError, match="block 0 has a variable 'x' already"):
        block._rename_var("w", "x")


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(VarType.LOD_TENSOR, True), (VarType.SELECTED_ROWS, True), (VarType.STEP_SCOPES, False),
     (VarType.RAW, False)],
)  # fmt: skip
def test_a_cloned_variable_outlives_a_run_unless_told_otherwise(kind: str, kept: bool) -> None:
    source, target = fluid.Program().global_block(), fluid.Program().global_block()
    variable = source.create_var(name="v", shape=[-1, 2], dtype="int64", type=kind, lod_level=1)
    copy = target._clone_variable(variable)
    assert (copy.shape, copy.dtype, copy.type, copy.lod_level) == ((-1, 2), "int64", kind, 1)
    assert copy.persistable is kept
    assert target._clone_variable(variable, force_persistable=False).persistable is False
    with pytest.raises(TypeError, match="what is cloned is of type str, not Variable"):
        target._clone_variable("v")  # type: ignore[arg-type]


def test_operators_are_put_in_and_taken_out_anywhere() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [4])
        block = main.global_block()
        outs = [block.create_var(name=name) for name in "abcd"]
        block.append_op(type="relu", inputs={"X": [x]}, outputs={"Out": [outs[0]]})
        block._prepend_op(type="exp", inputs={"X": x}, outputs={"Out": outs[1]})
        block._insert_op(
            1, type="tanh", inputs={"X": "x"}, outputs={"Out": "c"}, stop_gradient=True
        )
        block._insert_op_without_sync(
            3, "sqrt", inputs={"X": x}, outputs={"Out": outs[3]}, attrs={}
        )
        assert [op.type for op in block.ops] == ["exp", "tanh", "relu", "sqrt"]
        assert [op.idx for op in block.ops] == [0, 1, 2, 3]
        assert [op.type for op in block._slice_ops(1, 3)] == ["tanh", "relu"]
        assert outs[2].shape == (-1, 4)
        taken = block.ops[1]
        block._remove_op(1)
        with pytest.raises(ValueError, match="no longer in its block"):
            taken.idx  # noqa: B018
        block._remove_var("c")
        assert not block.has_var("c")


def test_variables_are_seen_from_blocks_within() -> None:
    with fresh() as (main, _):
        outer = layers.data("x", [4])
        inner = main._create_block()
        assert inner._find_var_recursive("x") is inner._var_recursive("x") is outer
        assert inner.has_var_recursive("x")
        assert not inner.has_var("x")
        assert inner._find_var_recursive("y") is None
        with pytest.raises(ValueError, match="has a variable 'y'"):
            inner._var_recursive("y")


def test_an_operator_answers_what_it_is() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [4])
        with (
            pytest.warns(UserWarning, match="has no effect here"),
            fluid.name_scope("encoder"),
            fluid.device_guard("gpu:1"),
        ):
            layers.scale(x, 2.0)
        layers.relu(x)
    first, second = main.global_block().ops
    assert (first.attr("op_namescope"), first.attr("op_device")) == ("/encoder/", "gpu:1")
    assert (second.attr("op_namescope"), second.attr("op_device")) == ("/", "")
    assert {"scale", "bias", "op_role", "op_callstack"} <= {*first.attr_names}
    assert first.all_attrs()["scale"] == 2.0
    assert first.has_attr("scale")
    assert not first.has_attr("axis")
    assert first.attr("axis") is None
    first._set_attr("scale", np.float32(3.0))
    assert type(first.attr("scale")) is float
    first._remove_attr("scale")
    assert not first.has_attr("scale")
    assert first.to_string(throw_on_error=True) == "{Out=['scale_0.tmp_0']} = scale(X=['x'])"
    with pytest.raises(ValueError, match="has no block as 'sub_block'"):
        first._block_attr("sub_block")


def test_what_is_wrong_with_an_operator_is_of_fluids_type() -> None:
    with fresh() as (main, _):
        x, block = layers.data("x", [4]), main.global_block()
        out = block.create_var(name="out")
        with pytest.raises(AssertionError, match="lacks its input 'X'") as missing:
            block.append_op("relu", {}, {"Out": out})
        assert isinstance(missing.value, AssertedError)
        with pytest.raises(ValueError, match="takes one variable as 'X', not 2"):
            block.append_op("relu", {"X": [x, x]}, {"Out": out})
        with pytest.raises(TypeError, match="'X' of operator 'relu' is a int"):
            block.append_op("relu", {"X": 3}, {"Out": out})  # type: ignore[dict-item]


def test_a_variable_may_be_declared_again_as_it_is() -> None:
    block = fluid.Program().global_block()
    known = block.create_var(name="v", shape=[2], dtype="int64", persistable=True)
    assert block.create_var(name="v") is known
    assert block.create_var(name="v", shape=[2]) is known
    again: list[dict[str, Any]] = [
        {"shape": [3]}, {"dtype": "float32"}, {"lod_level": 1}, {"persistable": False},
        {"type": VarType.SELECTED_ROWS},
    ]  # fmt: skip
    for said in again:
        with pytest.raises(ValueError, match=f"has {next(iter(said))} .* declared again with"):
            block.create_var(name="v", **said)


def test_a_change_of_a_variable_is_a_change_of_its_program() -> None:
    program = fluid.Program()
    variable = program.global_block().create_var(name="v", shape=[2])
    version = program.version
    variable.persistable = True
    assert program.version > version
    assert variable.grad_name == "v@GRAD"
    assert variable.op is None


@pytest.mark.parametrize("shape", [3, "ab", [2.5], [[1]]])
def test_what_is_no_shape(shape: Any) -> None:
    with pytest.raises(TypeError, match="is no shape"):
        fluid.Program().global_block().create_var(name="v", shape=shape)


def test_a_parameter_has_fluids_defaults() -> None:
    made = fluid.Program().global_block().create_parameter(name="w", shape=[2], dtype="float32")
    assert (made.trainable, made.persistable, made.is_distributed) == (True, True, False)
    assert made.optimize_attr == {"learning_rate": 1.0}
    assert (made.regularizer, made.gradient_clip_attr, made.do_model_average) == (None, None, None)


def test_scopes_nest_and_are_told_apart() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [4])
        for _ in range(2):
            with fluid.name_scope("a"):
                layers.relu(x)
                with fluid.name_scope("b"):
                    layers.relu(x)
    paths = [op.attr("op_namescope").replace("//", "/") for op in main.global_block().ops]
    first, number = paths[0], int(paths[0].strip("/").partition("_")[2] or 0)
    assert paths == [first, f"{first}b/", f"/a_{number + 1}/", f"/a_{number + 1}/b/"]
    for prefix in (None, ""):
        with pytest.raises(AssertionError, match="prefix is empty"), fluid.name_scope(prefix):
            pass


@pytest.mark.parametrize("device", ["cpu:0", "gpu:x", "tpu", "gpu:"])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(ValueError, match="is no device"), fluid.device_guard(device):
        pass


def test_names_are_counted_anew_within_a_guard() -> None:
    names = fluid.unique_name
    with names.guard():
        assert [names.generate("fc"), names.generate("fc"), names.generate("b")] == [
            "fc_0",
            "fc_1",
            "b_0",
        ]
        with names.guard("left/"):
            assert names.generate("fc") == "left/fc_0"
        old = names.switch()
        assert names.generate("fc") == "fc_0"
        names.switch(old)
        assert names.generate("fc") == "fc_2"
