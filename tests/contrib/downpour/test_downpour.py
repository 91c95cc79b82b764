"""DownpourSGD.minimize: tables and program configs of one or several losses, three return forms."""

import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.descriptions import PSParameter
from jaxfleet.contrib.downpour.messages import Message
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.distribute_lookup_table import (
    find_distributed_lookup_table,
    find_distributed_lookup_table_inputs,
    find_distributed_lookup_table_outputs,
)
from jaxfleet.fluid.distributed import DownpourSGD
from tests.contrib.downpour.jobs import ctr
from tests.fluid.nets import fresh

KEYS = ["program_configs", "trainer", "device_worker", "optimizer", "fleet_desc",
        "worker_skipped_ops"]  # fmt: skip


def test_one_loss_alone_returns_the_description_and_what_is_skipped() -> None:
    with fresh() as (main, _):
        loss, _, _ = ctr()
        made = DownpourSGD(0.1).minimize(loss)
    assert isinstance(made, list)
    desc, skipped = made
    assert isinstance(desc, Message)
    assert skipped == ["lookup_table", "lookup_table_grad"]
    assert desc.trainer_param[0].skip_op == tuple(skipped)
    assert main._fleet_opt["fleet_desc"] is desc
    desc.trainer_param.skip_op.extend(["pull"])
    assert 'skip_op: "pull"' in str(desc)
    read = Message(PSParameter)
    read.ParseFromString(desc.SerializeToString())
    assert read == desc


def test_a_list_of_losses_returns_none_and_each_ones_pairs() -> None:
    with fresh() as (main, _):
        loss, _, _ = ctr(data_norm=True)
        made = DownpourSGD(0.1).minimize([loss])
    assert isinstance(made, tuple)
    ops, (pairs,) = made
    assert ops is None
    assert [(p.name, g.name) for p, g in pairs] == [
        (name, f"{name}@GRAD")
        for name in ("b", "emb", "norm.batch_size", "norm.batch_square_sum", "norm.batch_sum", "w")
    ]
    assert not any(op._is_optimize_op() for op in main.global_block().ops)


def test_the_third_form_returns_the_first_losss_pairs_and_opt_info() -> None:
    with fresh() as (main, _):
        loss, _, _ = ctr()
        none, pairs, opt_info = DownpourSGD(0.1, window=2)._minimize(loss)
    assert none is None
    assert [p.name for p, _ in pairs] == ["b", "emb", "w"]
    assert opt_info is main._fleet_opt
    assert list(opt_info) == KEYS
    assert opt_info["program_configs"] == {
        str(id(main)): {
            "pull_sparse": [0], "push_sparse": [0], "pull_dense": [1], "push_dense": [1]
        }
    }  # fmt: skip
    assert (opt_info["trainer"], opt_info["device_worker"]) == ("DistMultiTrainer", "DownpourSGD")
    assert opt_info["fleet_desc"].trainer_param[0].push_dense_per_batch == 2


def test_data_norm_has_a_table_of_its_own() -> None:
    """Fluid's old server lacked the method and raised AttributeError; jaxfleet's has the table."""
    with fresh() as (main, _):
        loss, _, _ = ctr(data_norm=True)
        DownpourSGD(0.1).minimize([loss])
    config = main._fleet_opt["program_configs"][str(id(main))]
    assert config["pull_dense"] == config["push_dense"] == [1, 2]
    (trainer,) = main._fleet_opt["fleet_desc"].trainer_param
    assert [t.dense_variable_name for t in trainer.dense_table] == [
        ("b", "w"), ("norm.batch_size", "norm.batch_square_sum", "norm.batch_sum"),
    ]  # fmt: skip


def test_losses_of_several_programs_have_dense_tables_of_their_own() -> None:
    with fresh() as (main, startup):
        first, _, _ = ctr(data_norm=True)
        other = fluid.Program()
        with fluid.program_guard(other, startup):
            x = fluid.data("x", [None, 3])
            second = layers.mean(layers.fc(x, 1, param_attr="v", bias_attr=False))
        _, pairs = DownpourSGD(0.1).minimize([first, second])
    assert [len(found) for found in pairs] == [6, 1]
    assert other._fleet_opt is main._fleet_opt
    configs = main._fleet_opt["program_configs"]
    assert configs[str(id(main))]["pull_dense"] == [1, 2]
    assert configs[str(id(other))]["pull_dense"] == [3]
    (trainer,) = main._fleet_opt["fleet_desc"].trainer_param
    assert [one.program_id for one in trainer.program_config] == [str(id(main)), str(id(other))]
    assert [t.table_id for t in trainer.dense_table] == [1, 2, 3]


def test_several_losses_of_one_program_pull_all_of_their_tables() -> None:
    with fresh() as (main, _):
        first, out, _ = ctr()
        second = layers.mean(out * out)
        DownpourSGD(0.1).minimize([first, second])
    assert main._fleet_opt["program_configs"][str(id(main))]["push_dense"] == [1, 2]


def test_look_ups_of_the_table_are_found_with_what_goes_in_and_out() -> None:
    with fresh() as (main, _):
        ctr()
    name = find_distributed_lookup_table(main)
    assert name == "emb"
    ids = find_distributed_lookup_table_inputs(main, name)
    rows = find_distributed_lookup_table_outputs(main, name)
    assert [x.name for x in ids] == ["ids", "words"]
    assert [x.name for x in rows] == ["embedding_0.tmp_0", "embedding_1.tmp_0"]
    assert find_distributed_lookup_table_inputs(main, None) == []
    assert find_distributed_lookup_table_outputs(main, "w") == []


def test_the_table_begins_on_servers_and_not_in_the_startup_program() -> None:
    with fresh() as (_, startup):
        loss, _, _ = ctr()
        assert startup.global_block().has_var("emb")
        DownpourSGD(0.1).minimize([loss], startup)
    assert sorted(startup.global_block().vars) == ["b", "w"]


def test_parameters_may_be_listed() -> None:
    with fresh():
        loss, _, _ = ctr()
        made = DownpourSGD(0.1).minimize([loss], parameter_list=["w", "emb"])
    assert isinstance(made, tuple)
    assert [p.name for p, _ in made[1][0]] == ["emb", "w"]


@pytest.mark.parametrize("losses", [[], "loss", None, 3.0])
def test_what_is_no_loss_is_refused(losses: object) -> None:
    with pytest.raises(ValueError, match="losses is a list"):
        DownpourSGD().minimize(losses)  # type: ignore[arg-type]  # the point of the test


def test_arguments_are_checked() -> None:
    with pytest.raises(ProgramError, match="window is 0"):
        DownpourSGD(window=0)
    with pytest.raises(TypeError, match="a learning rate"):
        DownpourSGD("fast")  # type: ignore[arg-type]  # the point of the test
    with fresh(), pytest.raises(TypeError, match="a loss is of type str"):
        DownpourSGD().minimize(["loss"])  # type: ignore[list-item]  # the point of the test
