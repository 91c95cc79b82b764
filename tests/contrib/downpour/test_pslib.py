"""pslib's optimizer: table ids by name, options, strategies, files of descriptions."""

from pathlib import Path
from typing import Any

import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.descriptions import TableParameter
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.distributed import to_text
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib import (
    DistributedAdam,
    DownpourOptimizer,
)
from tests.contrib.downpour.jobs import ctr
from tests.fluid.nets import fresh

SERVED = "server_param { downpour_server_param { downpour_table_param"


def net(*tables: str, norm: bool = False) -> fluid.Variable:
    ids = fluid.data("ids", [None, 1], dtype="int64")
    rows = [
        layers.embedding(ids, [99, 3], is_sparse=True, is_distributed=True, param_attr=name)
        for name in tables
    ]
    x = layers.concat(rows, axis=1)
    x = layers.data_norm(x, name="norm") if norm else x
    return layers.mean(layers.fc(x, 1, param_attr="w", bias_attr=False))


def described(loss: fluid.Variable, **strategy: Any) -> dict[str, Any]:
    DownpourOptimizer(fluid.optimizer.Adam(), strategy).minimize(loss)
    found: dict[str, Any] = loss.block.program._fleet_opt
    return found


def test_the_options_have_fluids_names_and_defaults() -> None:
    with fresh() as (main, _):
        found = described(net("a"))
    tables = {"program_id_to_worker", "program_configs", "fleet_desc"}
    assert {name: value for name, value in found.items() if name not in tables} == {
        "trainer": "DistMultiTrainer", "device_worker": "DownpourSGD", "optimizer": "DownpourSGD",
        "worker_skipped_ops": ["lookup_table", "lookup_table_grad"], "use_cvm": False,
        "no_cvm": False, "stat_var_names": [], "local_tables": [], "async_tables": [],
        "scale_datanorm": -1, "check_nan_var_names": [], "dump_slot": True, "dump_converter": "",
        "dump_fields": [], "dump_file_num": 16, "dump_fields_path": "", "dump_param": [],
        "loss_names": [], "adjust_ins_weight": {}, "copy_table": {}, "mpi_rank": 0, "mpi_size": 1,
    }  # fmt: skip
    assert tables <= set(found)
    assert list(found["program_id_to_worker"]) == [str(id(main))]


def test_a_strategy_sets_options_and_the_accessor_decides_two() -> None:
    with fresh(), pytest.warns(UserWarning, match="'dump_fields' has no effect here"):
        found = described(net("a"), use_cvm=True, dump_fields=["x"], a={
            "sparse_accessor_class": "DownpourSparseValueAccessor"})  # fmt: skip
    assert (found["use_cvm"], found["dump_fields"]) == (True, ["x"])
    assert (found["no_cvm"], found["dump_slot"]) == (True, False)


def test_options_are_each_programs_own() -> None:
    with fresh():
        described(net("a"))["stat_var_names"].append("x")
    with fresh():
        assert described(net("a"))["stat_var_names"] == []


def test_tables_are_numbered_by_name_over_all_programs() -> None:
    with fresh() as (main, startup):
        first = net("b", "a", norm=True)
        other = fluid.Program()
        with fluid.program_guard(other, startup):
            second = net("c", "a")
        ops, pairs = DownpourOptimizer(fluid.optimizer.Adam()).minimize(
            [first, second], startup_programs=startup
        )
    assert ops == []
    assert [[p.name for p, _ in found] for found in pairs] == [
        ["a", "b", "norm.batch_size", "norm.batch_square_sum", "norm.batch_sum", "w"],
        ["a", "c", "w"],
    ]
    found = main._fleet_opt
    assert found is other._fleet_opt
    assert found["program_configs"] == {
        str(id(main)): {"pull_sparse": [0, 1], "push_sparse": [0, 1],
                        "pull_dense": [3, 4], "push_dense": [3, 4]},
        str(id(other)): {"pull_sparse": [2, 1], "push_sparse": [2, 1],
                         "pull_dense": [5], "push_dense": [5]},
    }  # fmt: skip
    assert [t.table_id for t in found["fleet_desc"].tables] == [0, 1, 2, 3, 4, 5]
    worker = found["program_id_to_worker"][str(id(other))]
    assert [t.table_id for t in worker.sparse_table] == [2, 1]
    assert not {"a", "b", "c"} & set(startup.global_block().vars)


def table(number: int, **strategy: Any) -> TableParameter:
    with fresh():
        found: TableParameter = described(net("a", norm=True), **strategy)["fleet_desc"].tables[
            number
        ]
    return found


def test_a_sparse_table_has_pslibs_defaults() -> None:
    assert (
        to_text(table(0))
        == """\
table_id: 0
table_class: "DownpourSparseTable"
shard_num: 1000
accessor {
  accessor_class: "DownpourCtrAccessor"
  sparse_sgd_param {
    learning_rate: 0.05
    initial_g2sum: 3.0
    initial_range: 0.0001
    weight_bounds: -10.0
    weight_bounds: 10.0
  }
  fea_dim: 11
  embedx_dim: 8
  embedx_threshold: 10
  downpour_accessor_param {
    nonclk_coeff: 0.1
    click_coeff: 1.0
    base_threshold: 1.5
    delta_threshold: 0.25
    delta_keep_days: 16.0
    show_click_decay_rate: 0.98
    delete_threshold: 0.8
    delete_after_unseen_days: 30.0
    ssd_unseenday_threshold: 1
  }
}
type: PS_SPARSE_TABLE
compress_in_save: true
enable_sparse_table_cache: true
sparse_table_cache_rate: 0.00055
sparse_table_cache_file_num: 16
"""
    )


def test_dense_tables_have_pslibs_defaults() -> None:
    dense, norm = table(1), table(2)
    assert dense.accessor is not None
    assert norm.accessor is not None
    assert (
        to_text(dense.accessor.dense_sgd_param)
        == """\
name: "adam"
adam {
  learning_rate: 5e-06
  avg_decay_rate: 0.999993
  ada_decay_rate: 0.9999
  ada_epsilon: 1e-08
  mom_decay_rate: 0.99
}
naive {
  learning_rate: 0.0002
}
"""
    )
    assert (
        to_text(norm.accessor.dense_sgd_param)
        == """\
name: "summary"
summary {
  summary_decay_rate: 0.999999
}
"""
    )
    assert (dense.accessor.fea_dim, norm.accessor.fea_dim) == (3, 9)


@pytest.mark.parametrize("optimizer", ["adam", "naive", "adagrad"])
def test_a_value_accessor_has_an_optimizer_by_name(optimizer: str) -> None:
    made = table(0, a={"sparse_accessor_class": "DownpourSparseValueAccessor",
                       "sparse_optimizer": optimizer, "sparse_learning_rate": 1})  # fmt: skip
    assert made.accessor is not None
    rule = made.accessor.sparse_commonsgd_param
    assert rule is not None
    assert rule.name == optimizer
    assert getattr(rule, optimizer).learning_rate == 1.0
    assert made.accessor.fea_dim == made.accessor.embedx_dim == 8


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"a": {"sparse_speed": 1}}, "strategy key 'sparse_speed' not support"),
        ({"a": {"dense_optimizer": "adam"}}, "strategy key 'dense_optimizer' not support"),
        ({"dense_table": {"dense_optimizer": "lamb"}}, "'lamb'"),
        ({"dense_table": {"a": 1}}, "strategy key 'a' not support"),
        ({"datanorm_table": {"a": 1}}, "strategy key 'a' not support"),
        ({"a": {"sparse_accessor_class": "Mine"}}, "'Mine'"),
        ({"a": {"sparse_embedx_dim": "wide"}}, "'wide'"),
        ({"fleet_desc_file": "/no/such/file"}, "'/no/such/file' cannot be read"),
    ],
)
def test_what_a_strategy_may_not_say(strategy: dict[str, Any], said: str) -> None:
    with fresh(), pytest.raises(ValueError, match=said):
        described(net("a", norm=True), **strategy)


def test_a_file_of_descriptions_goes_before_the_strategy(tmp_path: Path) -> None:
    path = tmp_path / "desc.prototxt"
    path.write_text("""
        server_param { downpour_server_param { downpour_table_param {
            table_id: 0 type: PS_SPARSE_TABLE
            accessor { accessor_class: "DownpourUnitAccessor" fea_dim: 3
                       sparse_sgd_param { learning_rate: 0.7 initial_g2sum: 1 } } } } }
        trainer_param { skip_op: "other" }
    """)
    with fresh() as (main, _):
        found = described(net("a"), fleet_desc_file=str(path), a={"sparse_learning_rate": 0.1})
    sparse, dense = found["fleet_desc"].tables
    assert sparse.accessor.accessor_class == "DownpourUnitAccessor"
    assert sparse.accessor.sparse_sgd_param.learning_rate == 0.7
    assert dense.table_id == 1
    assert found["dump_slot"] is True
    worker = found["program_id_to_worker"][str(id(main))]
    assert worker.skip_op == ("other", "lookup_table", "lookup_table_grad")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer_param {} trainer_param {}", "trainer param size != program size, 2 vs 1"),
        (f"{SERVED} {{ table_id: 0 type: PS_DENSE_TABLE }} }} }}",
         "expect table 0 type=PS_SPARSE_TABLE, but actual"),
        ("trainer_param { sparse_table { table_id: 0 slot_key: 'x' } }", "sparse table 0 is desc"),
        ("trainer_param { dense_table { table_id: 1 } }", "dense table 1 is described with"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "desc.prototxt"
    path.write_text(text)
    with fresh(), pytest.raises(ValueError, match=said):
        described(net("a"), fleet_desc_file=str(path))


def test_scopes_are_as_many_as_losses() -> None:
    with fresh(), pytest.raises(ValueError, match="You should make sure len"):
        DownpourOptimizer(fluid.optimizer.Adam()).minimize(net("a"), scopes=[fluid.Scope()] * 2)


def test_gradients_and_updates_are_no_steps_of_their_own() -> None:
    optimizer = DownpourOptimizer(fluid.optimizer.Adam())
    with pytest.raises(NotImplementedError, match="no backward"):
        optimizer.backward(None)
    with pytest.raises(NotImplementedError, match="no apply_gradients"):
        optimizer.apply_gradients([])


def test_another_optimizer_is_said_to_be_unused(capsys: pytest.CaptureFixture[str]) -> None:
    DownpourOptimizer(fluid.optimizer.SGD(0.1))
    said = capsys.readouterr().out
    assert said.startswith("Currently, distributed optimizer only support Adam")
    with pytest.raises(TypeError, match="a strategy is of type list"):
        DownpourOptimizer(fluid.optimizer.Adam(), [])  # type: ignore[arg-type]  # the point


def test_distributed_adam_returns_what_fluids_does() -> None:
    with fresh():
        loss, _, _ = ctr()
        ops, (pairs,), opt_info = DistributedAdam(fluid.optimizer.Adam()).minimize([loss])
    assert ops == []
    assert [p.name for p, _ in pairs] == ["b", "emb", "w"]
    assert "mpi_rank" not in opt_info
    with fresh(), pytest.raises(ProgramError, match="there is no loss"):
        DownpourOptimizer(fluid.optimizer.Adam()).minimize([])
