"""Descriptions of how fluid's trainer goes through a dataset, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.device_worker import DeviceWorker, WorkerDesc
from jaxfleet.fluid.distributed.descriptions import PSParameter
from jaxfleet.fluid.distributed.messages import description_of
from jaxfleet.fluid.distributed.text import to_text
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.program import Program

# What a program's `_fleet_opt` may say of its trainer, and what holds where it does not.
OPTIONS: Mapping[str, Any] = {
    "use_cvm": False,
    "no_cvm": False,
    "scale_datanorm": -1.0,
    "dump_slot": False,
    "mpi_rank": 0,
    "mpi_size": 1,
    "dump_fields": [],
    "dump_fields_path": "",
    "dump_file_num": 16,
    "dump_converter": "",
    "dump_param": [],
    "check_nan_var_names": [],
    "loss_names": [],
}


@dataclass(frozen=True)
class TrainerDescription:
    """How a trainer goes through a dataset.

    Attributes:
        class_name: fluid's class of it.
        device_worker: what each thread does; None until it is put together.
        fleet_desc: the job's tables; None where there are none.
    """

    class_name: str
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
    device_worker: WorkerDesc | None = None
    fleet_desc: PSParameter | None = None


class TrainerDesc:
    """Puts a description together; the trainers below say which."""

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
        """Takes what is to be dumped, which the description alone shows."""
        if value and value != OPTIONS[name]:
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
        """Takes what a program says of its trainer."""
        self._opt_info = opt_info
        for name, default in OPTIONS.items():
            value = opt_info.get(name, default)
            self._said[name] = tuple(value) if isinstance(value, list) else value

    def _gen_trainer_desc(self) -> None:
        """Puts the device worker's part together.

        Raises:
            ProgramError: there is no worker.
        """
        if self._worker is None:
            raise mistake("the trainer has no device worker", "call _set_device_worker first")
        self._worker._set_infer(bool(self._said.get("is_infer", False)))
        if self._program is not None:
            self._worker._set_program(self._program)
        self._said["device_worker"] = self._worker._gen_worker_desc(self._opt_info)

    @property
    def proto_desc(self) -> TrainerDescription:
        """What was put together so far."""
        return TrainerDescription(self.class_name, **self._said)

    def _desc(self) -> str:
        """Returns it as text."""
        return to_text(self.proto_desc)


class MultiTrainer(TrainerDesc):
    """Threads that train a program with its own updates."""

    class_name = "MultiTrainer"


class DistMultiTrainer(TrainerDesc):
    """Threads that pull from servers, and push to them."""

    class_name = "DistMultiTrainer"
