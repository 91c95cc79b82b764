"""Layers, gradients and optimizers add the operators of fluid 1.8.5, one by one."""

from typing import Any

import pytest

from jaxfleet import fluid
from tests.fluid.nets import built
from tests.fluid.recorded import Case, cases, local, programs

COLLECTIVE = [case for case in cases("collective_cases") if case["mode"] == "GradAllReduce"]
ONE_SERVER = [
    case
    for case in cases("transpile_cases")
    if len(case["pservers"]) == 1 and not case["config"] and case["net"] != "ctr"
]


def id_of(case: Case) -> str:
    return f"{case['net']}-{case['optimizer']}"


@pytest.mark.parametrize(("net", "optimizer"), programs(), ids="-".join)
def test_a_program_has_fluids_operators_in_fluids_order(net: str, optimizer: str) -> None:
    main, _ = built(net, optimizer)
    case = programs()[net, optimizer]
    assert [op.type for op in main.global_block().ops] == case["single_ops"]
    assert [[p.name, list(p.shape)] for p in main.all_parameters()] == case["params"]


@pytest.mark.parametrize("case", ONE_SERVER, ids=id_of)
def test_a_startup_program_begins_everything_in_fluids_order(case: Case) -> None:
    _, startup = built(case["net"], case["optimizer"])
    made = [[op.type, op.output_arg_names] for op in startup.global_block().ops]
    assert made == next(iter(case["servers"].values()))["startup"]


@pytest.mark.parametrize("case", COLLECTIVE, ids=id_of)
def test_every_operator_reads_and_writes_what_fluids_did(case: Case) -> None:
    main, _ = built(case["net"], case["optimizer"])
    recorded = local(case["main"])
    for op, wanted in zip(main.global_block().ops, recorded, strict=True):
        assert op.type == wanted["type"]
        assert op.output_arg_names == wanted["out"], op
        read = [name for name, _ in zip(op.input_arg_names, wanted["in"], strict=True)]
        known = ["<tmp>" if w == "<tmp>" else n for n, w in zip(read, wanted["in"], strict=True)]
        assert known == wanted["in"], op


def test_the_roles_are_those_of_the_original() -> None:
    main, _ = built("fc1", "sgd_decay")
    roles = {op.type: op.attr("op_role") for op in main.global_block().ops}
    assert roles["mul"] == 0
    assert roles["mean"] == 256
    assert roles["mul_grad"] == 1
    assert roles["sgd"] == 2
    assert roles["increment"] == 16
    assert next(op for op in main.global_block().ops if op.attr("op_role") == 257)


def test_the_last_operator_of_a_gradient_says_whose_it_is() -> None:
    main, _ = built("fc1", "sgd")
    about = [op.attr("op_role_var") for op in main.global_block().ops if op.type == "mul_grad"]
    assert about == [["out_w", "out_w@GRAD"], ["fc_w", "fc_w@GRAD"]]


def test_a_copy_for_tests_has_no_gradients_and_drops_nothing_out() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.unique_name.guard(), fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 4])
        hidden = fluid.layers.dropout(fluid.layers.fc(x, 3), 0.5)
        loss = fluid.layers.mean(hidden)
        fluid.optimizer.SGD(0.1).minimize(loss)
    tested = main.clone(for_test=True)
    types = [op.type for op in tested.global_block().ops]
    assert types == ["mul", "elementwise_add", "dropout", "mean"]
    assert tested.global_block().ops[2].attr("is_test") is True
    assert main.global_block().ops[2].attr("is_test") is False
    assert [p.name for p in tested.all_parameters()] == ["fc_0.w_0", "fc_0.b_0"]


def test_shapes_follow_from_what_operators_compute() -> None:
    with fluid.unique_name.guard(), fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 6, 4])
        flat = fluid.layers.reshape(x, [-1, 8])
        shapes: list[Any] = [
            fluid.layers.fc(x, 5).shape,
            fluid.layers.fc(x, 5, num_flatten_dims=2).shape,
            flat.shape,
            fluid.layers.reduce_sum(x, dim=1).shape,
            fluid.layers.reduce_sum(x).shape,
            fluid.layers.transpose(x, [1, 0, 2]).shape,
            fluid.layers.concat([x, x], axis=2).shape,
        ]
    assert shapes == [(-1, 5), (-1, 6, 5), (-1, 8), (-1, 4), (1,), (6, -1, 4), (-1, 6, 8)]
    assert str(flat.sizes[0]) == "3*b"  # type: ignore[index]


def test_an_unknown_axis_beside_a_known_one_is_of_its_size() -> None:
    with fluid.unique_name.guard(), fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 4])
        rows = fluid.layers.fill_constant([3, 2], "float32", 1.0)
        assert fluid.layers.concat([x, rows], axis=1).shape == (3, 6)
        whole = fluid.layers.fill_constant([3, 4], "float32", 1.0)
        assert fluid.layers.elementwise_add(x, whole).shape == (3, 4)
