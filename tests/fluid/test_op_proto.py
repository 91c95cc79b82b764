"""Operator types as described by `fluid.framework.OpProtoHolder`."""

import pytest

from jaxfleet import fluid
from jaxfleet.fluid.framework import OpProtoHolder


def test_an_operator_type_is_described_by_its_slots_and_attributes() -> None:
    holder = OpProtoHolder.instance()
    assert holder is OpProtoHolder.instance()
    proto = holder.get_op_proto("sum")
    assert [(slot.name, slot.duplicable) for slot in proto.inputs] == [("X", True)]
    assert [slot.name for slot in proto.outputs] == ["Out"]
    scale = holder.get_op_proto("scale")
    assert {attr.name for attr in scale.attrs} >= {"scale", "bias"}
    with pytest.raises(ValueError, match='"skale" has not been registered'):
        holder.get_op_proto("skale")


def test_attributes_that_every_operator_has_are_named_by_the_core() -> None:
    core = fluid.core.op_proto_and_checker_maker
    named = {core.kOpRoleAttrName(), core.kOpRoleVarAttrName(), core.kOpNameScopeAttrName()}
    assert named | {core.kOpDeviceAttrName()} <= OpProtoHolder.generated_op_attr_names()
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.device_guard("cpu"):
        made = fluid.layers.fill_constant([1], "float32", 0.0)
    assert made.block.ops[-1].attr(core.kOpDeviceAttrName()) == "cpu"
