"""Attributes of a DistributeTranspiler that scripts read after it has run."""

import pytest

from jaxfleet import fluid
from jaxfleet.fluid import framework
from jaxfleet.fluid.transpiler import (
    DistributedMode,
    DistributeTranspilerConfig,
    RoundRobin,
    distribute_transpiler,
)
from tests.fluid.nets import built, ctr, fresh

ENDPOINTS = ["127.0.0.1:6174", "127.0.0.1:6175"]
_OF_FLUID = [
    "config",
    "server_config",
    "distributed_mode",
    "counter_var",
    "origin_program",
    "startup_program",
    "origin_startup_program",
    "trainer_num",
    "sync_mode",
    "trainer_id",
    "pserver_endpoints",
    "vars_overview",
    "optimize_ops",
    "params_grads",
    "table_name",
    "has_distributed_lookup_table",
    "param_name_to_grad_name",
    "grad_name_to_param_name",
    "sparse_update_ops",
    "sparse_param_to_height_sections",
    "need_delete_optimize_vars",
    "param_var_mapping",
    "grad_var_mapping",
    "grad_param_mapping",
    "param_grad_ep_mapping",
    "grad_name_to_send_dummy_out",
]


def transpiled(
    config: DistributeTranspilerConfig | None = None, *, sync: bool = True
) -> fluid.DistributeTranspiler:
    """Returns a transpiler of a net whose first matrix is cut in two, as trainer 1 of 2."""
    main, startup = built("mlp", "momentum")
    made = fluid.DistributeTranspiler(config)
    made.transpile(1, main, ",".join(ENDPOINTS), 2, sync, startup)
    return made


def names(variables: list[fluid.Variable]) -> list[str]:
    return [variable.name for variable in variables]


def test_all_attributes_of_fluid_are_there() -> None:
    made = transpiled()
    assert len(_OF_FLUID) == 26
    assert [name for name in _OF_FLUID if not hasattr(made, name)] == []
    assert (made.trainer_num, made.trainer_id, made.sync_mode) == (2, 1, True)
    assert made.pserver_endpoints == ENDPOINTS
    assert made.origin_program is made.get_trainer_program(wait_port=False)
    assert made.table_name is None
    assert not made.has_distributed_lookup_table


def test_mappings_name_slices_as_the_trainer_sends_them() -> None:
    made = transpiled()
    assert names(made.param_var_mapping["w0"]) == ["w0.block0", "w0.block1"]
    assert names(made.grad_var_mapping["w0@GRAD"]) == [
        "w0@GRAD.block0.trainer_1",
        "w0@GRAD.block1.trainer_1",
    ]
    assert names(made.param_var_mapping["b0"]) == ["b0"]
    assert names(made.grad_var_mapping["b0@GRAD"]) == ["b0@GRAD.trainer_1"]
    assert made.param_name_to_grad_name["w0"] == "w0@GRAD"
    assert made.grad_name_to_param_name["b1@GRAD"] == "b1"
    pairs = {g.name: p.name for g, p in made.grad_param_mapping.items()}
    assert pairs["w0@GRAD.block1.trainer_1"] == "w0.block1"


def test_servers_have_what_their_programs_hold() -> None:
    made = transpiled()
    for endpoint, has in made.param_grad_ep_mapping.items():
        held = {v.slice.name for v in made.vars_overview.get_distributed_vars_by_ep(endpoint)}
        assert set(names(has["params"])) <= held
        assert len(has["params"]) == len(has["grads"])
        server = made.get_pserver_program(endpoint).global_block()
        assert all(server.has_var(name) for name in names(has["params"]))
    assert list(made.param_grad_ep_mapping) == ENDPOINTS


def test_updates_and_controls_are_those_of_the_program() -> None:
    made = transpiled()
    updates = [op for op in made.optimize_ops if op.type == "momentum"]
    assert len(updates) == 6
    assert sorted(p.name for p, _ in made.params_grads) == ["b0", "b1", "b2", "w0", "w1", "w2"]
    assert any("velocity" in name for name in made.need_delete_optimize_vars)
    sends = [op for op in made.origin_program.global_block().ops if op.type == "send"]
    controls = {v.name for v in made.grad_name_to_send_dummy_out.values()}
    assert controls == {name for op in sends for name in op.output("Out")}


def test_tables_that_trainers_never_hold_have_sections() -> None:
    with fresh() as (main, startup):
        fluid.optimizer.SGD(0.1).minimize(ctr())
    made = fluid.DistributeTranspiler()
    made.transpile(0, main, ",".join(ENDPOINTS), 1, startup_program=startup)
    rows = made.sparse_param_to_height_sections["emb"]
    assert sum(rows) == 10001
    assert len(rows) == 2
    assert made.sparse_update_ops == []


def test_a_config_without_a_method_gets_round_robin() -> None:
    config = DistributeTranspilerConfig()
    fluid.DistributeTranspiler(config)
    assert config.split_method is RoundRobin


@pytest.mark.parametrize(
    ("sync", "split", "mode"),
    [
        (True, False, DistributedMode.SYNC),
        (False, True, DistributedMode.ASYNC),
        (False, False, DistributedMode.HALF_ASYNC),
    ],
)
def test_the_mode_is_counted_as_fluid_does(sync: bool, split: bool, mode: int) -> None:
    config = DistributeTranspilerConfig()
    config.sync_mode, config.runtime_split_send_recv = sync, split
    assert fluid.DistributeTranspiler(config).distributed_mode == mode


def test_slices_that_no_operator_cuts_are_described_too() -> None:
    config = DistributeTranspilerConfig()
    config.sync_mode, config.runtime_split_send_recv = False, True
    made = transpiled(config, sync=False)
    first, second = made.param_var_mapping["w0"]
    assert (first.name, second.name) == ("w0.block0", "w0.block1")
    assert first.shape[0] + second.shape[0] == 784
    assert not made.origin_program.global_block().has_var("w0.block0")


def test_the_names_by_which_operators_are_marked() -> None:
    assert distribute_transpiler.RPC_OP_ROLE_ATTR_NAME == "op_role"
    assert distribute_transpiler.OP_ROLE_VAR_ATTR_NAME == "op_role_var"
    sends = [op for op in transpiled().origin_program.global_block().ops if op.type == "send"]
    assert {op.attr(distribute_transpiler.RPC_OP_ROLE_ATTR_NAME) for op in sends} == {
        distribute_transpiler.RPC_OP_ROLE_ATTR_VALUE
    }
    role = fluid.core.op_proto_and_checker_maker.OpRole
    assert role.Optimize == distribute_transpiler.OPT_OP_ROLE_ATTR_VALUE
    assert role.Dist == distribute_transpiler.DIST_OP_ROLE_ATTR_VALUE
    assert role.LRSched == distribute_transpiler.LR_SCHED_OP_ROLE_ATTR_VALUE


def test_control_variables_get_new_names() -> None:
    with fluid.unique_name.guard():
        made = [framework.generate_control_dev_var_name() for _ in range(2)]
    assert made == ["__control_var@__control_var_0", "__control_var@__control_var_1"]
