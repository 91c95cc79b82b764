"""A serialized program is restored with all attributes of its parameters."""

import json
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.ir import Literal
from tests.fluid.nets import built, fresh


def again(program: fluid.Program) -> fluid.Program:
    return fluid.Program.parse_from_string(program.desc.serialize_to_string())


@pytest.mark.parametrize(("net", "optimizer"), [("ctr", "adam_decay"), ("mlp", "sgd_clip")])
def test_a_program_comes_back_as_it_was(net: str, optimizer: str) -> None:
    for program in built(net, optimizer):
        copy = again(program)
        assert ir_program(copy) == ir_program(program)
        assert copy.to_string(throw_on_error=False, with_details=True) == program.to_string(
            throw_on_error=False, with_details=True
        )
        for op, other in zip(program.global_block().ops, copy.global_block().ops, strict=True):
            assert op.source == other.source


def test_a_program_that_was_read_runs_as_the_one_that_was_written() -> None:
    rows = np.ones((2, 3), np.float32)
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        loss = layers.mean(layers.dropout(layers.fc(layers.data("x", [3]), 2), 0.5, seed=3))
        fluid.optimizer.SGD(0.1).minimize(loss)
        main.random_seed = 7
        copies = again(main), again(startup)
        assert copies[0].random_seed == 7
        values = []
        for program, begin in ((main, startup), copies):
            with fluid.scope_guard(fluid.Scope()):
                exe = fluid.Executor()
                exe.run(begin, scope=fluid.global_scope())
                fluid.global_scope().var("fc_0.w_0").get_tensor().set(np.ones((3, 2), np.float32))
                exe.run(program, feed={"x": rows})
                values += exe.run(program, feed={"x": rows}, fetch_list=[loss.name])
    np.testing.assert_array_equal(*values)


def test_what_parameters_and_variables_say_is_kept() -> None:
    with fresh() as (main, _):
        rate = layers.create_global_var([1], 0.1, "float32", persistable=True, name="rate")
        regularizer = fluid.regularizer.L1Decay(0.3)
        attr = fluid.ParamAttr("w", trainable=False, regularizer=regularizer, learning_rate=2.0)
        hidden = layers.fc(layers.data("x", [3]), 2, param_attr=attr, bias_attr="b")
        hidden.error_clip = fluid.clip.ErrorClipByValue(0.5)
        hidden.lod_level = 1
        fluid.clip.set_gradient_clip(fluid.clip.GradientClipByGlobalNorm(2.0, "group"), ["b"])
        main.all_parameters()[1].optimize_attr["learning_rate"] = rate
        main.all_parameters()[0].is_distributed = True
        main._facts.update(role="trainer", endpoints=("a:1", "b:2"), trainers=2)
        main._endpoints = ["a:1", "b:2"]
    copy = again(main)
    weight, bias = copy.all_parameters()
    assert (weight.trainable, weight.is_distributed) == (False, True)
    assert weight.optimize_attr == {"learning_rate": 2.0}
    assert isinstance(weight.regularizer, fluid.regularizer.L1Decay)
    assert weight.regularizer._coeff == 0.3
    assert bias.optimize_attr["learning_rate"] is copy.global_block().var("rate")
    assert bias.gradient_clip_attr.clip_norm == 2.0
    assert bias.gradient_clip_attr.group_name == "group"
    copied = copy.global_block().var(hidden.name)
    assert (copied.lod_level, copied.error_clip.max, copied.error_clip.min) == (1, 0.5, -0.5)
    assert copy._facts == {"role": "trainer", "endpoints": ("a:1", "b:2"), "trainers": 2}
    assert copy._endpoints == ["a:1", "b:2"]


def test_attributes_of_every_kind_are_kept() -> None:
    program = fluid.Program()
    block = program.global_block()
    given: dict[str, Any] = {
        "sub_block": program._create_block(), "pair": (1, (2.5, "a")), "rows": [[1, 2], [3]],
        "limit": float("inf"), "text": "\u00e9\n", "flag": True, "literal": Literal.of(2.0, "f32"),
    }  # fmt: skip
    program._rollback()
    block.append_op("go", attrs=given)
    copy = again(program)
    (op,) = copy.global_block().ops
    assert op._block_attr("sub_block") is copy.block(1)
    for name in given.keys() - {"sub_block"}:
        assert op.attr(name) == given[name]
        assert type(op.attr(name)) is type(given[name])
    assert copy.current_block_idx == 0


def test_what_cannot_be_written_is_named() -> None:
    class Own(fluid.regularizer.L2DecayRegularizer):
        pass

    with fresh() as (main, _):
        layers.fc(layers.data("x", [3]), 2, param_attr=fluid.ParamAttr("w", regularizer=Own(0.1)))
        with pytest.raises(ProgramError, match="Own of 'w' cannot be written"):
            main.serialize_to_string()


def test_damage_is_named() -> None:
    main, _ = built("fc1", "sgd")
    data = main.serialize_to_string()
    for wrong in (b"", data[: len(data) // 2], b"\x80\x04", b"[1]", b"{}"):
        with pytest.raises(ProgramError, match="damaged, or none of ours"):
            fluid.Program.parse_from_string(wrong)
    with pytest.raises(ProgramError, match="does not match its checksum"):
        fluid.Program.parse_from_string(data.replace(b"elementwise_add", b"elementwise_sub", 1))
    newer = json.loads(data)
    newer["version"] = 2
    with pytest.raises(ProgramError, match="version 2"):
        fluid.Program.parse_from_string(json.dumps(newer).encode())
    with pytest.raises(TypeError, match="binary_str is of type str, not bytes"):
        fluid.Program.parse_from_string(data.decode())  # type: ignore[arg-type]
