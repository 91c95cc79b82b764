"""Cases of fluid's own tests on transpilers whose trainers update: geo and federated averaging."""

from functools import cache
from typing import Any

import pytest

from jaxfleet import fluid
from tests.fluid.nets import fresh
from tests.fluid.test_peer_tables import A, B, blocks, types


class Job:
    """Two lookups in one sparse table."""

    def __init__(self, transpiler: Any, *, distributed: bool = False, trainers: int = 2) -> None:
        self.transpiler = transpiler
        with fresh() as (self.main, self.startup):
            looked_up = [
                fluid.embedding(
                    fluid.data(f"ids{n}", [None], dtype="int64"), [10000, 8], is_sparse=True,
                    is_distributed=distributed, param_attr="emb",
                )
                for n in range(2)
            ]  # fmt: skip
            x = fluid.layers.concat(looked_up, axis=1)
            out = fluid.layers.fc(x, 2, param_attr="fc_w", bias_attr="fc_b")
            fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(out))
            self.before = types(self.main)
            transpiler.transpile(1, pservers=f"{A},{B}", trainers=trainers)
        self.trainer = transpiler.get_trainer_program(wait_port=False)


@cache
def geo() -> Job:
    return Job(fluid.transpiler.GeoSgdTranspiler())


@cache
def averaged(*, weighted: bool = False) -> Job:
    return Job(fluid.FLDistributeTranspiler(weighted=weighted))


# --- GEO-SGD ---------------------------------------------------------------------------------


def test_geo_trainers_update_locally_and_send_the_ids_they_looked_up() -> None:
    job = geo()
    assert types(job.trainer) == [*job.before, "send"]
    assert types(job.trainer).count("sgd") == 3
    send = job.trainer.global_block().ops[-1]
    assert (send.input("X"), send.attr("send_varnames")) == (["ids0", "ids1"], ["emb", "emb"])
    lookups = [op for op in job.trainer.global_block().ops if op.type.startswith("lookup_table")]
    assert not any(op.attr("remote_prefetch") for op in lookups)


def test_geo_trainers_initialize_everything_and_receive_dense_parameters() -> None:
    ops = geo().startup.global_block().ops
    made = [op.type for op in ops]
    assert sorted(made[:4]) == ["fill_constant"] * 2 + ["uniform_random"] * 2
    assert made[4:] == ["recv", "recv", "fetch_barrier", "send"]
    assert [op.output("Out") for op in ops[4:6]] == [["fc_b"], ["fc_w"]]
    assert (ops[-1].input("X"), ops[-1].attr("send_varnames")) == (["param_init"], ["param_init"])


def test_geo_servers_add_deltas() -> None:
    server, startup = geo().transpiler.get_pserver_programs(A)
    assert blocks(server) == [["listen_and_serv"], ["sum"], ["sum"]]
    adds = [(op.input("X"), op.output("Out")) for b in server.blocks[1:] for op in b.ops]
    assert adds == [
        (["emb.block0", "emb.block0.delta"], ["emb.block0"]),
        (["fc_b", "fc_b.delta"], ["fc_b"]),
    ]
    (serve,) = server.global_block().ops
    assert serve.attr("distributed_mode") == fluid.transpiler.DistributedMode.GEO
    assert serve.attr("grad_to_block_id") == ["emb.block0.delta:1", "fc_b.delta:2"]
    assert serve.attr("sparse_grad_to_param") == ["emb.block0.delta:emb.block0"]
    assert serve.input("X") == []
    delta = server.global_block().var("emb.block0.delta")
    assert (str(delta.type), delta.persistable) == (
        str(fluid.core.VarDesc.VarType.SELECTED_ROWS),
        False,
    )
    begun = {name for op in startup.global_block().ops for name in op.output_arg_names}
    assert begun == {"emb.block0", "fc_b"}  # servers have no optimizer


def test_where_slices_lie_as_the_communicator_is_told() -> None:
    assert geo().transpiler._get_vars_info()["emb"] == {
        "var_names": ["emb.block0", "emb.block1"],
        "sections": ["5000", "5000"],
        "epmap": [A, B],
        "is_sparse": ["True"],
    }
    assert geo().transpiler._get_vars_info()["fc_b"]["is_sparse"] == ["False"]


def test_geo_refuses_a_distributed_table_and_leaves_the_programs_alone() -> None:
    transpiler = fluid.transpiler.GeoSgdTranspiler()
    with pytest.raises(ValueError, match="'emb' is distributed, and trainers hold all rows"):
        Job(transpiler, distributed=True)


def test_geo_refuses_to_push_never() -> None:
    config = fluid.DistributeTranspilerConfig()
    config.geo_sgd_need_push_nums = 0
    with pytest.raises(ValueError, match="geo_sgd_need_push_nums is 0"):
        Job(fluid.transpiler.GeoSgdTranspiler(config))


# --- federated averaging ---------------------------------------------------------------------


def test_trainers_send_copies_of_what_they_updated() -> None:
    job = averaged()
    added = types(job.trainer)[len(job.before) :]
    assert added == ["scale"] * 3 + ["send"] * 3 + ["send_barrier"]
    assert job.transpiler.split_num == len(job.before) + 3
    ops = job.trainer.global_block().ops
    copies = {op.input("X")[0]: op.output("Out")[0] for op in ops if op.type == "scale"}
    assert copies == {name: f"{name}.opti.trainer_1" for name in ("emb", "fc_b", "fc_w")}
    assert all(job.trainer.global_block().var(name).persistable for name in copies.values())
    sends = [op for op in ops if op.type == "send"]
    assert [op.attr("op_role_var") for op in sends] == [[p, c] for p, c in copies.items()]
    assert {name for op in sends for name in op.attr("epmap")} == {A, B}


def test_a_trainers_program_is_cut_in_halves() -> None:
    job = averaged()
    train, send = job.transpiler.train_program, job.transpiler.send_program
    assert [*types(train), *types(send)] == types(job.trainer)
    assert types(train)[-1] == "scale"
    assert types(job.transpiler.recv_program) == ["recv"] * 3 + ["fetch_barrier"]
    assert types(job.startup)[-4:] == ["recv"] * 3 + ["fetch_barrier"]
    copies = job.transpiler._opti_var_list
    assert set(copies) == set(job.transpiler.opti_name_to_send_dummy_out)
    number = job.transpiler.trainer_id
    assert all(copy.endswith(f".opti.trainer_{number}") for copy in copies)
    for has in job.transpiler.param_grad_ep_mapping.values():
        names = [v.name for v in has["params"]]
        assert [v.name for v in has["opti"]] == [f"{name}.opti.trainer_{number}" for name in names]
        assert set(names) <= set(job.transpiler._opti_to_param.values())


def test_servers_take_the_mean_of_copies() -> None:
    job = averaged()
    made = {ep: job.transpiler.get_pserver_program(ep) for ep in (A, B)}
    held = sorted(p.name for server in made.values() for p in server.all_parameters())
    assert held == ["emb", "fc_b", "fc_w"]  # whole, each somewhere
    server = made[A]
    (serve,) = server.global_block().ops
    assert (serve.type, serve.attr("Fanin"), serve.attr("sync_mode")) == (
        "fl_listen_and_serv",
        2,
        True,
    )
    assert [b.idx for b in serve.attr("optimize_blocks")] == list(range(1, len(server.blocks)))
    for block in server.blocks[1:]:
        added, mean = block.ops
        (param,) = mean.output("Out")
        assert added.input("X") == [f"{param}.opti.trainer_{t}" for t in (0, 1)]
        assert (mean.type, mean.attr("scale")) == ("scale", 0.5)


def test_copies_are_weighed_by_samples_where_that_is_asked_for() -> None:
    job = averaged(weighted=True)
    assert job.transpiler.samples == "@FL_SAMPLES@.trainer_1"
    assert types(job.transpiler.train_program) == job.before
    send = types(job.transpiler.send_program)
    assert send == ["elementwise_mul"] * 3 + ["send"] * 4 + ["send_barrier"]
    server = job.transpiler.get_pserver_program(A)
    assert blocks(server)[1] == ["sum"]
    assert all(block == ["sum", "elementwise_div"] for block in blocks(server)[2:])
