"""Descriptions of fluid's trainers and workers, from a program's job attributes."""

from typing import Any

import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.trainer_desc import TrainerFactory
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.distributed import DownpourSGD
from tests.fluid.nets import fresh


def job() -> tuple[fluid.Program, dict[str, Any]]:
    """Returns the program of the peer's test, and its job attributes."""
    with fresh() as (main, _):
        x = fluid.layers.data("x", [1], dtype="int64")
        rows = layers.embedding(x, [1, 2], is_distributed=True)
        loss = layers.mean(layers.fc(rows, 1))
        _, _, opt_info = DownpourSGD()._minimize(loss)
    return main, opt_info


@pytest.mark.parametrize("worker", ["DownpourSGD", "DownpourSGDOPT"])
@pytest.mark.parametrize("use_cvm", [True, False])
def test_workers_of_a_downpour_job_are_described(worker: str, use_cvm: bool) -> None:
    main, opt_info = job()
    opt_info |= {"device_worker": worker, "use_cvm": use_cvm, "scale_datanorm": -1,
                 "dump_slot": False, "stat_var_names": []}  # fmt: skip
    trainer = TrainerFactory()._create_trainer(opt_info)
    trainer._set_program(main)
    trainer._gen_trainer_desc()
    desc = trainer.proto_desc
    assert desc.class_name == "DistMultiTrainer"
    assert desc.use_cvm is use_cvm
    told = desc.device_worker
    assert told is not None
    assert told.device_worker_name in {"DownpourWorker", "DownpourWorkerOpt"}
    assert told.sparse_table[0].emb_dim == (11 if use_cvm else 9)
    assert told.sparse_table[0].label_var_name == "click"
    assert told.dense_table[0].dense_value_name == ("fc_0.b_0", "fc_0.w_0")
    assert told.program_config[0].pull_dense_table_id == (1,)
    text = trainer._desc()
    assert 'class_name: "DistMultiTrainer"' in text
    assert "fleet_desc {" in text


def test_inference_pushes_nothing() -> None:
    main, opt_info = job()
    trainer = TrainerFactory()._create_trainer(opt_info)
    trainer._set_program(main)
    trainer._set_infer(infer=True)
    trainer._gen_trainer_desc()
    told = trainer.proto_desc.device_worker
    assert told is not None
    assert told.program_config[0].push_sparse_table_id == ()
    assert told.program_config[0].pull_sparse_table_id == (0,)


def test_a_plain_program_has_a_plain_trainer() -> None:
    trainer = TrainerFactory()._create_trainer()
    trainer._set_thread(3)
    trainer._set_debug(debug=True)
    trainer._set_fetch_var_and_info(["loss"], ["the loss"], 7)
    trainer._gen_trainer_desc()
    desc = trainer.proto_desc
    assert (desc.class_name, desc.thread_num, desc.debug) == ("MultiTrainer", 3, True)
    assert (desc.fetch_vars, desc.fetch_info, desc.print_period) == (("loss",), ("the loss",), 7)
    assert desc.device_worker is not None
    assert desc.device_worker.device_worker_name == "HogwildWorker"


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ProgramError, match="there is no 'PipelineTrainer' here"):
        TrainerFactory()._create_trainer({"trainer": "PipelineTrainer"})
    _, opt_info = job()
    trainer = TrainerFactory()._create_trainer(opt_info)
    trainer._set_program(fluid.Program())
    with pytest.raises(ProgramError, match="in no program_config"):
        trainer._gen_trainer_desc()


def test_what_a_trainer_dumps_is_described_field_by_field() -> None:
    trainer = TrainerFactory()._create_trainer()
    trainer._set_mpi_rank(1)
    trainer._set_mpi_size(4)
    trainer._set_dump_file_num(16)  # the existing number
    given: dict[str, Any] = {
        "dump_slot": True,
        "dump_fields": ["fc_0.tmp_0", "fc_1.tmp_0"],
        "dump_fields_path": "./dump",
        "dump_converter": "python",
        "dump_param": ["w"],
        "check_nan_var_names": ["loss"],
    }
    for name, value in given.items():
        with pytest.warns(UserWarning, match=f"TrainerDesc._set_{name} has no effect here"):
            getattr(trainer, f"_set_{name}")(value)
    trainer._set_use_cvm(True)
    trainer._set_no_cvm(False)
    trainer._set_scale_datanorm(0.5)
    trainer._set_loss_names(["loss"])
    desc = trainer.proto_desc
    assert (desc.dump_fields, desc.dump_param) == (("fc_0.tmp_0", "fc_1.tmp_0"), ("w",))
    assert (desc.dump_fields_path, desc.dump_file_num) == ("./dump", 16)
    assert (desc.dump_converter, desc.dump_slot, desc.mpi_rank) == ("python", True, 1)
    assert (desc.mpi_size, desc.use_cvm, desc.no_cvm) == (4, True, False)
    assert (desc.scale_datanorm, desc.check_nan_var_names) == (0.5, ("loss",))
    assert desc.loss_names == ("loss",)
