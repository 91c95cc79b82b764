"""Descriptions of trainers and their device workers, as plain data, and their factory.

The Executor does not use them: they present `_fleet_opt` as fluid's runtime received it, for
scripts and tests that read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from jaxfleet.contrib.downpour.descriptions import (
    DownpourTrainerParameter,
    ProgramConfig,
    PSParameter,
)
from jaxfleet.contrib.downpour.messages import description_of
from jaxfleet.contrib.downpour.text_format import to_text
from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.program import Program

_LABEL = "click"
_COUNTS = 2  # columns of a row for shows and clicks


@dataclass(frozen=True)
class SparseTableDesc:
    """A sparse table as a worker sees it."""

    table_id: int
    sparse_key_name: tuple[str, ...]
    sparse_value_name: tuple[str, ...]
    sparse_grad_name: tuple[str, ...]
    emb_dim: int  # columns of a row that the program reads
    fea_dim: int
    label_var_name: str = _LABEL  # the variable that marks clicked samples


@dataclass(frozen=True)
class DenseTableDesc:
    """A dense table as a worker sees it."""

    table_id: int
    dense_value_name: tuple[str, ...]
    dense_grad_name: tuple[str, ...]


@dataclass(frozen=True)
class WorkerDesc:
    """Configuration of a worker: fluid's class of it, and the operator types that it skips."""

    device_worker_name: str
    skip_ops: tuple[str, ...] = ()
    sparse_table: tuple[SparseTableDesc, ...] = ()
    dense_table: tuple[DenseTableDesc, ...] = ()
    program_config: tuple[ProgramConfig, ...] = ()


class DeviceWorker:
    """Base class of device workers."""

    worker_name = ""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._infer = False

    def _set_infer(self, infer: bool = False) -> None:
        self._infer = infer

    def _set_program(self, program: Program) -> None:
        self._program = program

    def _gen_worker_desc(self, opt_info: Mapping[str, Any]) -> WorkerDesc:
        del opt_info
        return WorkerDesc(self.worker_name)


class Hogwild(DeviceWorker):
    """Runs a program with its own updates, as the Executor does without `_fleet_opt`."""

    worker_name = "HogwildWorker"


class DownpourSGD(DeviceWorker):
    """Looks up rows, runs a program without look-ups, and pushes gradients."""

    worker_name = "DownpourWorker"

    def _gen_worker_desc(self, opt_info: Mapping[str, Any]) -> WorkerDesc:
        """Builds the description; the program must be set and be one of `_fleet_opt`."""
        program_id = str(id(self._program))
        configs = opt_info.get("program_configs", {})
        if self._program is None or program_id not in configs:
            raise mistake("the worker's program is in no program_config", "call _set_program first")
        trainer = _told(opt_info, program_id)
        config, dims = configs[program_id], _fea_dims(description_of(opt_info["fleet_desc"]))
        counts = 0 if opt_info.get("use_cvm") or opt_info.get("no_cvm") else _COUNTS
        sparse = tuple(
            SparseTableDesc(
                table.table_id or 0,
                table.slot_key,
                table.slot_value,
                table.slot_gradient,
                dims.get(table.table_id or 0, 0) - counts,
                dims.get(table.table_id or 0, 0),
            )
            for table in trainer.sparse_table
        )
        dense = tuple(
            DenseTableDesc(
                table.table_id or 0, table.dense_variable_name, table.dense_gradient_variable_name
            )
            for table in trainer.dense_table
            if table.table_id in config["pull_dense"]
        )
        said = ProgramConfig(
            program_id,
            () if self._infer else tuple(config["push_sparse"]),
            () if self._infer else tuple(config["push_dense"]),
            tuple(config["pull_sparse"]),
            tuple(config["pull_dense"]),
        )
        skipped = tuple(opt_info.get("worker_skipped_ops", ()))
        return WorkerDesc(self.worker_name, skipped, sparse, dense, (said,))


class DownpourSGDOPT(DownpourSGD):
    """`DownpourSGD` with fluid's second way of iterating over look-ups."""

    worker_name = "DownpourWorkerOpt"


def _told(opt_info: Mapping[str, Any], program_id: str) -> DownpourTrainerParameter:
    known = opt_info.get("program_id_to_worker", {}).get(program_id)
    if isinstance(known, DownpourTrainerParameter):
        return known
    desc: PSParameter = description_of(opt_info["fleet_desc"])
    return desc.trainer_param[0] if desc.trainer_param else DownpourTrainerParameter()


def _fea_dims(desc: PSParameter) -> dict[int, int]:
    return {t.table_id or 0: (t.accessor and t.accessor.fea_dim) or 0 for t in desc.tables}


@dataclass(frozen=True)
class TrainerDescription:
    """A trainer's configuration for going through a dataset."""

    class_name: str  # fluid's class of the trainer
    thread_num: int = 1
    debug: bool = False
    is_infer: bool = False
    fetch_vars: tuple[str, ...] = ()
    fetch_info: tuple[str, ...] = ()
    print_period: int = 100
    use_cvm: bool = False
    no_cvm: bool = False
    scale_datanorm: float = -1.0
    dump_slot: bool = False
    mpi_rank: int = 0
    mpi_size: int = 1
    dump_fields: tuple[str, ...] = ()
    dump_fields_path: str = ""
    dump_file_num: int = 16
    dump_converter: str = ""
    dump_param: tuple[str, ...] = ()
    check_nan_var_names: tuple[str, ...] = ()
    loss_names: tuple[str, ...] = ()
    device_worker: WorkerDesc | None = None  # configuration of each thread; None until generated
    fleet_desc: PSParameter | None = None  # the job's tables; None without them


# Trainer options in a program's `_fleet_opt`, with their defaults.
_OPTIONS: Mapping[str, Any] = {
    one.name: one.default
    for one in fields(TrainerDescription)
    if one.name in {"use_cvm", "no_cvm", "scale_datanorm", "mpi_rank", "mpi_size", "loss_names"}
    or one.name.startswith(("dump_", "check_nan_"))
}


class TrainerDesc:
    """Builder of a description; base class of the trainers below."""

    class_name = ""

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}
        self._worker: DeviceWorker | None = None
        self._program: Program | None = None
        self._opt_info: Mapping[str, Any] = {}

    def _set_thread(self, thread_num: int) -> None:
        self._said["thread_num"] = thread_num

    def _set_debug(self, debug: bool) -> None:
        self._said["debug"] = debug

    def _set_infer(self, infer: bool) -> None:
        self._said["is_infer"] = infer

    def _set_fetch_var_and_info(
        self, fetch_vars: Sequence[Any], fetch_info: Sequence[str], print_period: int
    ) -> None:
        self._said["fetch_vars"] = tuple(x if isinstance(x, str) else x.name for x in fetch_vars)
        self._said["fetch_info"] = tuple(fetch_info)
        self._said["print_period"] = print_period

    def _set_device_worker(self, device_worker: DeviceWorker) -> None:
        self._worker = device_worker

    def _set_program(self, program: Program) -> None:
        self._program = program

    def _set_fleet_desc(self, fleet_desc: PSParameter) -> None:
        self._said["fleet_desc"] = description_of(fleet_desc)

    def _set_dump_fields(self, dump_fields: Sequence[str]) -> None:
        self._set_dumped("dump_fields", dump_fields)

    def _set_dump_fields_path(self, path: str) -> None:
        self._set_dumped("dump_fields_path", path)

    def _set_dump_file_num(self, dump_file_num: int) -> None:
        self._set_dumped("dump_file_num", dump_file_num)

    def _set_dump_converter(self, converter: str) -> None:
        self._set_dumped("dump_converter", converter)

    def _set_dump_param(self, dump_param: Sequence[str]) -> None:
        self._set_dumped("dump_param", dump_param)

    def _set_dump_slot(self, dump_slot: bool) -> None:
        self._set_dumped("dump_slot", dump_slot)

    def _set_dumped(self, name: str, value: Any) -> None:
        """Sets an option of dumping, which only appears in the description."""
        if value and value != _OPTIONS[name]:
            warn_no_effect(f"TrainerDesc._set_{name}", "no samples are dumped; fetch what you need")
        self._said[name] = tuple(value) if isinstance(value, list | tuple) else value

    def _set_mpi_rank(self, mpi_rank: int) -> None:
        self._said["mpi_rank"] = mpi_rank

    def _set_mpi_size(self, mpi_size: int) -> None:
        self._said["mpi_size"] = mpi_size

    def _set_use_cvm(self, use_cvm: bool = False) -> None:
        self._said["use_cvm"] = use_cvm

    def _set_no_cvm(self, no_cvm: bool = False) -> None:
        self._said["no_cvm"] = no_cvm

    def _set_scale_datanorm(self, scale_datanorm: float = -1.0) -> None:
        self._said["scale_datanorm"] = scale_datanorm

    def _set_check_nan_var_names(self, check_nan_var_names: Sequence[str]) -> None:
        if check_nan_var_names:
            hint = "set FLAGS_check_nan_inf, which checks all that a step makes"
            warn_no_effect("TrainerDesc._set_check_nan_var_names", hint)
        self._said["check_nan_var_names"] = tuple(check_nan_var_names)

    def _set_loss_names(self, loss_names: Sequence[str]) -> None:
        self._said["loss_names"] = tuple(loss_names)

    def _set_opt_info(self, opt_info: Mapping[str, Any]) -> None:
        """Sets a program's options of its trainer."""
        self._opt_info = opt_info
        for name, default in _OPTIONS.items():
            value = opt_info.get(name, default)
            self._said[name] = tuple(value) if isinstance(value, list) else value

    def _gen_trainer_desc(self) -> None:
        """Generates the device worker's part; a worker must be set."""
        if self._worker is None:
            raise mistake("the trainer has no device worker", "call _set_device_worker first")
        self._worker._set_infer(bool(self._said.get("is_infer", False)))
        if self._program is not None:
            self._worker._set_program(self._program)
        self._said["device_worker"] = self._worker._gen_worker_desc(self._opt_info)

    @property
    def proto_desc(self) -> TrainerDescription:
        return TrainerDescription(self.class_name, **self._said)

    def _desc(self) -> str:
        return to_text(self.proto_desc)


class MultiTrainer(TrainerDesc):
    """Threads that train a program with its own updates."""

    class_name = "MultiTrainer"


class DistMultiTrainer(TrainerDesc):
    """Threads that pull from and push to servers."""

    class_name = "DistMultiTrainer"


T = TypeVar("T")
_TRAINERS: Mapping[str, type[TrainerDesc]] = {
    "MultiTrainer": MultiTrainer,
    "DistMultiTrainer": DistMultiTrainer,
}
_WORKERS: Mapping[str, type[DeviceWorker]] = {
    "Hogwild": Hogwild,
    "DownpourSGD": DownpourSGD,
    "DownpourSGDOPT": DownpourSGDOPT,
}


class TrainerFactory:
    """Factory of trainers."""

    def _create_trainer(self, opt_info: Mapping[str, Any] | None = None) -> TrainerDesc:
        """Creates the trainer and device worker that `opt_info` names, or else the plain ones.

        Raises:
            ProgramError: there is no such trainer or worker.
        """
        said = opt_info or {}
        trainer = _named(_TRAINERS, said.get("trainer", "MultiTrainer"))()
        trainer._set_device_worker(_named(_WORKERS, said.get("device_worker", "Hogwild"))())
        trainer._set_opt_info(said)
        desc = description_of(said.get("fleet_desc"))
        if isinstance(desc, PSParameter):
            trainer._set_fleet_desc(desc)
        return trainer


def _named(known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise mistake(f"there is no {name!r} here", f"one of {', '.join(known)}")
    return known[name]
