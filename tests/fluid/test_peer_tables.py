"""Cases of fluid's own tests on tables held by servers; `peer_cases.md` lists them."""

from typing import Any

import pytest

from jaxfleet import fluid
from tests.fluid.nets import fresh

A, B = "127.0.0.1:6174", "127.0.0.1:6175"


class Job:
    """Two lookups in one table, a layer, SGD; transpiled for two trainers and two servers."""

    def __init__(
        self, *, distributed: bool = False, rows: int = 10000, sync_mode: bool = True, **config: Any
    ) -> None:
        chosen = fluid.DistributeTranspilerConfig()
        chosen.wait_port, chosen.sync_mode = False, sync_mode
        for name, value in config.items():
            setattr(chosen, name, value)
        self.transpiler = fluid.DistributeTranspiler(chosen)
        with fresh() as (self.main, self.startup):
            looked_up = [self.look_up(n, rows, distributed) for n in range(2)]
            x = fluid.layers.concat(looked_up, axis=1)
            out = fluid.layers.fc(x, 2, param_attr="fc_w", bias_attr="fc_b")
            fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(out))
            self.transpiler.transpile(0, pservers=f"{A},{B}", trainers=2, sync_mode=sync_mode)
        self.trainer = self.transpiler.get_trainer_program()

    @staticmethod
    def look_up(number: int, rows: int, distributed: bool) -> fluid.Variable:
        ids = fluid.data(f"ids{number}", [None], dtype="int64")
        return fluid.embedding(
            ids, [rows, 8], is_sparse=True, is_distributed=distributed, param_attr="emb"
        )

    def server(self, endpoint: str) -> fluid.Program:
        return self.transpiler.get_pserver_program(endpoint)


def types(program: fluid.Program) -> list[str]:
    return [op.type for op in program.global_block().ops]


def blocks(program: fluid.Program) -> list[list[str]]:
    return [[op.type for op in block.ops] for block in program.blocks]


def only(program: fluid.Program, op_type: str) -> list[Any]:
    return [op for op in program.global_block().ops if op.type == op_type]


def test_a_sparse_table_is_cut_by_rows() -> None:
    job = Job()
    held = {ep: {p.name: p.shape for p in job.server(ep).all_parameters()} for ep in (A, B)}
    assert held[A] == {"emb.block0": (5000, 8), "fc_b": (2,)}
    assert held[B] == {"emb.block1": (5000, 8), "fc_w": (16, 2)}
    (serve,) = job.server(A).global_block().ops
    assert serve.attr("sparse_grad_to_param") == ["emb@GRAD.block0:emb.block0"]


def test_an_async_trainer_sends_a_table_gradient_with_its_sections() -> None:
    job = Job(sync_mode=False, runtime_split_send_recv=True)
    assert types(job.trainer)[-3:] == ["send", "recv", "recv"]
    send = only(job.trainer, "send")[-1]
    assert (send.input("X"), send.attr("sections")) == (["emb@GRAD"], [5000, 5000])
    assert send.attr("send_varnames") == ["emb@GRAD.block0", "emb@GRAD.block1"]


def test_a_trainers_startup_only_fakes_the_table() -> None:
    job = Job()
    made = [(op.type, op.output_arg_names) for op in job.startup.global_block().ops]
    assert sorted(made[:2]) == [("fill_constant", ["fc_b"]), ("uniform_random", ["fc_w"])]
    assert [op for op, _ in made[2:]] == ["recv", "recv", "fetch_barrier", "fake_init"]
    assert made[-1][1] == ["emb"]
    assert only(job.startup, "fake_init")[0].attr("shape") == [10000, 8]


def test_every_table_is_faked_in_the_trainers_startup() -> None:
    with fresh() as (_, startup):
        parts = []
        for name, rows, width in (("emb", 10000, 8), ("emb_w", 10000, 8), ("emb_b", 10000, 1)):
            ids = fluid.data(f"ids_{name}", [None], dtype="int64")
            attr = fluid.ParamAttr(name=name)
            parts.append(fluid.embedding(ids, [rows, width], is_sparse=True, param_attr=attr))
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.concat(parts, axis=1), 1))
        fluid.optimizer.SGD(0.1).minimize(loss)
        config = fluid.DistributeTranspilerConfig()
        config.wait_port = False
        fluid.DistributeTranspiler(config).transpile(0, pservers=f"{A},{B}", trainers=2)
    assert types(startup).count("fake_init") == 3


def test_look_ups_become_one_question() -> None:
    (lookup,) = only(Job().trainer, "distributed_lookup_table")
    assert lookup.input("Ids") == ["ids0", "ids1"]
    assert len(lookup.output("Outputs")) == 2
    assert lookup.attr("table_names") == ["emb.block0", "emb.block1"]
    assert lookup.attr("height_sections") == [5000, 5000]


def test_rows_that_decide_what_is_asked_next_are_refused() -> None:
    config = fluid.DistributeTranspilerConfig()
    config.wait_port = False
    with fresh():
        ids = fluid.data("ids", [None], dtype="int64")
        first = fluid.embedding(ids, [100, 1], is_sparse=True, param_attr="emb")
        more = fluid.layers.reshape(fluid.layers.cast(first, "int64"), [-1])
        second = fluid.embedding(more, [100, 1], is_sparse=True, param_attr="emb")
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(second))
        with pytest.raises(ValueError, match="decide what another asks for"):
            fluid.DistributeTranspiler(config).transpile(0, pservers=A, trainers=2)


def test_a_server_of_a_distributed_table_has_lookup_and_save_blocks() -> None:
    job = Job(distributed=True)
    server = job.server(A)
    wanted = [["listen_and_serv"], ["sum", "scale", "sgd"], ["sum", "sgd"]]
    assert blocks(server) == [*wanted, ["lookup_sparse_table"], ["save"]]
    assert [block.parent_idx for block in server.blocks] == [-1, 0, 0, 2, 2]
    (serve,) = server.global_block().ops
    assert serve.attr("checkpint_block_id") == 4
    assert serve.attr("prefetch_var_name_to_block_id") == ["prefetch_compress_in_tmp_0:3"]
    buffers = [f"emb@GRAD.trainer_{t}.pserver_0" for t in (0, 1)]
    assert serve.input("X")[-2:] == buffers
    assert server.block(2).ops[0].input("X") == buffers
    assert server.global_block().var("emb").shape == (5000, 8)
    (begins,) = [op for op in only(job.transpiler.get_startup_program(A), "uniform_random")
                 if op.output_arg_names == ["emb"]]  # fmt: skip
    assert begins.attr("shape") == [5000, 8]


def test_a_trainer_prefetches_rows_of_a_distributed_table() -> None:
    job = Job(distributed=True)
    made = types(job.trainer)
    assert made[:4] == ["split_ids", "prefetch", "merge_ids", "concat"]
    tail = ["sum", "split_ids", "send", "send_barrier", "recv", "recv", "fetch_barrier"]
    assert made[-7:] == tail
    send = only(job.trainer, "send")[-1]
    assert send.input("X") == [f"emb@GRAD.trainer_0.pserver_{n}" for n in (0, 1)]
    assert send.attr("epmap") == [A, B]
    assert types(job.startup)[-2:] == ["fetch_barrier", "fake_init"]


def test_an_async_job_with_a_distributed_table_has_no_barriers() -> None:
    job = Job(distributed=True, sync_mode=False)
    assert blocks(job.server(A))[1:] == [["sgd"], ["sgd"], ["lookup_sparse_table"], ["save"]]
    assert not {"send_barrier", "fetch_barrier"} & set(types(job.trainer))


def test_the_last_server_has_the_rows_left_over() -> None:
    assert Job(distributed=True, rows=1001).server(B).global_block().var("emb").shape == (501, 8)


def test_a_trainer_program_records_its_distributed_table() -> None:
    program = Job(distributed=True).trainer
    assert (program._is_distributed, program._is_chief) == (True, True)
    assert program._distributed_lookup_table == "emb"
    assert program._endpoints == [A, B]


def test_two_distributed_tables_are_refused() -> None:
    with fresh():
        parts = []
        for name in ("one", "two"):
            ids = fluid.data(f"ids_{name}", [None], dtype="int64")
            attr = fluid.ParamAttr(name=name)
            parts.append(fluid.embedding(ids, [100, 4], is_distributed=True, param_attr=attr))
        loss = fluid.layers.mean(fluid.layers.concat(parts, axis=1))
        with pytest.raises(RuntimeError, match="'one' and 'two' are both distributed"):
            fluid.optimizer.SGD(0.1).minimize(loss)


def test_look_ups_that_share_a_table_are_asked_together() -> None:
    """The list is 1.3's, whose trainers looked rows up themselves; 1.8's query servers first."""
    layers = fluid.layers

    def pooled(name: str, table: str) -> fluid.Variable:
        ids = layers.data(name, [1], dtype="int64", lod_level=1)
        rows = layers.embedding(ids, [1000, 64], is_sparse=True, param_attr=table)
        return layers.sequence_pool(rows, "average")

    config = fluid.DistributeTranspilerConfig()
    config.wait_port = False
    transpiler = fluid.DistributeTranspiler(config)
    with fresh():
        shared = [pooled(name, "shared_w") for name in ("title_ids", "brand_ids")]
        x = layers.concat([*shared, pooled("profile_ids", "profile_emb")], axis=1)
        out = layers.fc(x, 2, param_attr="fc_w", bias_attr="fc_b")
        loss = layers.cross_entropy(out, layers.data("label", [1], dtype="int64"))
        fluid.optimizer.Adam(0.003).minimize(layers.mean(loss))
        transpiler.transpile(0, pservers=f"{A},{B}", trainers=2)
    made = types(transpiler.get_trainer_program())
    assert made[:5] == ["distributed_lookup_table"] * 2 + ["sequence_pool"] * 3
    assert " ".join(made[5:]) == (
        "concat mul elementwise_add cross_entropy2 mean fill_constant mean_grad "
        "cross_entropy_grad2 elementwise_add_grad send mul_grad send concat_grad "
        "sequence_pool_grad lookup_table_grad split_selected_rows send sequence_pool_grad "
        "lookup_table_grad sequence_pool_grad lookup_table_grad sum split_selected_rows send "
        "send_barrier recv recv fetch_barrier"
    )
    for endpoint in (A, B):
        made_there = blocks(transpiler.get_pserver_program(endpoint))
        assert made_there == [["listen_and_serv"], *[["sum", "scale", "adam"]] * 3]
