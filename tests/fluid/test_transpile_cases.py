"""Every recorded transpilation of fluid 1.8.5, written by jaxfleet's passes."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from jaxfleet import fluid
from tests.fluid.nets import NETS, fresh, optimizer
from tests.fluid.recorded import Case, cases

CASES: list[Case] = cases("transpile_cases")
_COMMUNICATE = (
    *("send", "recv", "send_barrier", "fetch_barrier", "split_byref", "split_selected_rows"),
    *("concat", "distributed_lookup_table"),
)
_SERVE = {
    "sparse_grad_to_param": [],
    "lr_decay_block_id": -1,
    "checkpint_block_id": -1,
    "dc_asgd": False,
}


class Transpiled:
    """A recorded case, transpiled by jaxfleet's front end."""

    def __init__(self, case: Case) -> None:
        config = fluid.DistributeTranspilerConfig()
        if not case["sync_mode"]:
            config.sync_mode = False
        for name, value in case["config"].items():
            setattr(config, name, value)
        config.wait_port = False
        self.transpiler = fluid.DistributeTranspiler(config)
        with fresh() as (main, startup):
            loss = NETS[case["net"]]()
            optimizer(case["optimizer"]).minimize(loss)
            self.single = [op.type for op in main.global_block().ops]
            self.transpiler.transpile(
                0,
                pservers=",".join(case["pservers"]),
                trainers=case["trainers"],
                sync_mode=case["sync_mode"],
            )
        self.trainer, self.startup = self.transpiler.get_trainer_program(), startup
        self.servers = {ep: self.transpiler.get_pserver_programs(ep) for ep in case["pservers"]}


@cache
def transpiled(case_id: str) -> Transpiled:
    return Transpiled(next(case for case in CASES if case["id"] == case_id))


def shapes(variables: Iterable[Any]) -> list[list[Any]]:
    return sorted([v.name, list(v.shape)] for v in variables)


def shown(names: list[str]) -> list[str]:
    return ["<control>" if name.startswith("__control_var@") else name for name in names]


def communication(program: fluid.Program, recorded: list[Case]) -> list[Case]:
    """Returns the operators that communicate, with their recorded attributes."""
    found: list[Case] = []
    ops = program.global_block().ops
    for place, op in enumerate(ops):
        if op.type not in _COMMUNICATE:
            continue
        made = {"at": place, "type": op.type}
        made |= {"in": shown(op.input_arg_names), "out": shown(op.output_arg_names)}
        wanted = recorded[len(found)] if len(found) < len(recorded) else {}
        made |= {name: op.attr(name) for name in wanted if name not in made}
        found.append(made)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_trainers_are_fluids(case: Case) -> None:
    made = transpiled(case["id"])
    assert made.single == case["single_ops"]
    ops = made.trainer.global_block().ops
    assert [op.type for op in ops] == case["trainer_ops"]
    assert communication(made.trainer, case["trainer_comm"]) == case["trainer_comm"]
    assert [op.type for op in made.startup.global_block().ops] == case["trainer_startup"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_servers_are_fluids(case: Case) -> None:
    made = transpiled(case["id"])
    for endpoint, wanted in case["servers"].items():
        main, startup = made.servers[endpoint]
        assert [[op.type for op in block.ops] for block in main.blocks] == wanted["blocks"]
        kept = [v for v in main.global_block().vars.values() if v.persistable]
        assert shapes(kept) == wanted["vars"]
        (serve,) = main.global_block().ops
        attrs = {**_SERVE, **serve.all_attrs()}
        attrs["grad_to_block_id"] = sorted(attrs["grad_to_block_id"])
        attrs["optimize_blocks"] = [block.idx for block in attrs["optimize_blocks"]]
        recorded = wanted["listen_and_serv"]
        recorded = {**recorded, "grad_to_block_id": sorted(recorded["grad_to_block_id"])}
        assert {name: attrs[name] for name in recorded} == recorded
        begun = [[op.type, op.output_arg_names] for op in startup.global_block().ops]
        assert begun == wanted["startup"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_blocks_lie_where_fluids_did(case: Case) -> None:
    made = transpiled(case["id"])
    for endpoint, wanted in case["placement"].items():
        main, _ = made.servers[endpoint]
        held = [p.name for p in main.all_parameters()]
        assert sorted(held) == sorted(wanted["params"])
    variables = dict(shapes(v for v in made.trainer.list_vars() if v.sizes is not None))
    for blocks in case["param_blocks"].values():
        for name, shape in blocks:
            known = [dict(shapes(main.list_vars())) for main, _ in made.servers.values()]
            assert shape in [each.get(name) for each in known]
    for blocks in case["grad_blocks"].values():
        for name, shape in blocks:
            if not case["config"].get("runtime_split_send_recv"):
                assert variables[name] == shape
