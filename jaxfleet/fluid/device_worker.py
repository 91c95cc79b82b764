"""Descriptions of what each thread of fluid's trainer does with its batches, as plain data.

Our executor needs none of them: they are what `_fleet_opt` says, put together as fluid's runtime
was told it, for scripts and tests that look at it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.distributed.descriptions import (
    DownpourTrainerParameter,
    ProgramConfig,
    PSParameter,
)
from jaxfleet.fluid.distributed.messages import description_of
from jaxfleet.fluid.program import Program

_LABEL = "click"
_COUNTS = 2  # columns of a row that count shows and clicks


@dataclass(frozen=True)
class SparseTableDesc:
    """A sparse table to a worker.

    Attributes:
        emb_dim: columns of a row that the program is given.
        label_var_name: what tells which samples were clicked.
    """

    table_id: int
    sparse_key_name: tuple[str, ...]
    sparse_value_name: tuple[str, ...]
    sparse_grad_name: tuple[str, ...]
    emb_dim: int
    fea_dim: int
    label_var_name: str = _LABEL


@dataclass(frozen=True)
class DenseTableDesc:
    """A dense table to a worker."""

    table_id: int
    dense_value_name: tuple[str, ...]
    dense_grad_name: tuple[str, ...]


@dataclass(frozen=True)
class WorkerDesc:
    """What a worker does.

    Attributes:
        device_worker_name: fluid's class of it.
        skip_ops: what it does not run.
        program_config: which tables it pulls and pushes.
    """

    device_worker_name: str
    skip_ops: tuple[str, ...] = ()
    sparse_table: tuple[SparseTableDesc, ...] = ()
    dense_table: tuple[DenseTableDesc, ...] = ()
    program_config: tuple[ProgramConfig, ...] = ()


class DeviceWorker:
    """What describes a kind of worker."""

    worker_name = ""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._infer = False

    def _set_infer(self, infer: bool = False) -> None:
        self._infer = infer

    def _set_program(self, program: Program) -> None:
        self._program = program

    def _gen_worker_desc(self, opt_info: Mapping[str, Any]) -> WorkerDesc:
        """Returns the description for what a program says."""
        del opt_info
        return WorkerDesc(self.worker_name)


class Hogwild(DeviceWorker):
    """Runs a program with its own updates; so does our executor without `_fleet_opt`."""

    worker_name = "HogwildWorker"


class DownpourSGD(DeviceWorker):
    """Looks up rows, runs a program without look-ups, and pushes gradients."""

    worker_name = "DownpourWorker"

    def _gen_worker_desc(self, opt_info: Mapping[str, Any]) -> WorkerDesc:
        """Returns the description for what a program says.

        Raises:
            ProgramError: the program was not set, or is not in what is said.
        """
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
    """The same, by fluid's second way of going through look-ups."""

    worker_name = "DownpourWorkerOpt"


def _told(opt_info: Mapping[str, Any], program_id: str) -> DownpourTrainerParameter:
    known = opt_info.get("program_id_to_worker", {}).get(program_id)
    if isinstance(known, DownpourTrainerParameter):
        return known
    desc: PSParameter = description_of(opt_info["fleet_desc"])
    return desc.trainer_param[0] if desc.trainer_param else DownpourTrainerParameter()


def _fea_dims(desc: PSParameter) -> dict[int, int]:
    return {t.table_id or 0: (t.accessor and t.accessor.fea_dim) or 0 for t in desc.tables}
