"""Collective: the fleet of ranks that train together without servers."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfleet.cluster.bootstrap import detected_rank
from jaxfleet.cluster.filesystems import FS, LocalFS
from jaxfleet.cluster.roles import ClusterRoleMaker, RoleMakerBase
from jaxfleet.errors import AssertedError
from jaxfleet.fleet import OnlyWorker
from jaxfleet.fluid import io
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.compiler import CompiledProgram
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.incubate.fleet.base.fleet_base import Fleet, Mode
from jaxfleet.fluid.incubate.fleet.collective.checkpoints import (
    PARAMS,
    PREFIX,
    TrainStatus,
    checkpoint_numbers,
    read_checkpoint,
    write_checkpoint,
)
from jaxfleet.fluid.incubate.fleet.collective.optimizer import (
    CollectiveOptimizer,
    DistributedStrategy,
)
from jaxfleet.ops.user_frames import warn_at_caller

_CONNECT_S = 120.0  # the time for a cluster to report where its processes meet
_CACHE = ".cache"
_LOCAL = LocalFS()


class Collective(Fleet):
    """A job whose ranks exchange gradients or parameters directly.

    `main_program` and `startup_program` are this rank's, once `minimize` has run; the main one is a
    Program, or in `nccl2` mode a CompiledProgram.
    """

    def __init__(self) -> None:
        super().__init__(Mode.COLLECTIVE)
        # Programs once `minimize` has run; None for scripts that read them earlier.
        self.main_program: Any = None
        self.startup_program: Any = None
        self._origin_program: Program | None = None

    def _without_servers(self) -> RoleMakerBase:
        """Returns the default role maker: a cluster may define the ranks, as it does for jax."""
        found = super()._without_servers()
        if isinstance(found, OnlyWorker) and detected_rank(_CONNECT_S) is not None:
            return ClusterRoleMaker()
        return found

    def init_worker(self) -> None:
        """Only reports that it does nothing: the startup program joins ranks."""
        _not_called("init_worker")

    def run_worker(self, main_programs: Any = None, scopes: Any = None) -> None:
        """Only reports that it does nothing: an Executor runs `main_program`."""
        del main_programs, scopes
        _not_called("run_worker")

    def init_server(self, model_dir: str | None = None) -> None:
        """Only reports that it does nothing: there are no servers."""
        del model_dir
        _not_called("init_server")

    def run_server(self) -> None:
        """Only reports that it does nothing, likewise."""
        _not_called("run_server")

    def stop_worker(self) -> None:
        """Only reports that it does nothing: the end of the script suffices."""
        _not_called("stop_worker")

    def distributed_optimizer(
        self, optimizer: Any, strategy: DistributedStrategy | None = None
    ) -> CollectiveOptimizer:
        """Returns an optimizer whose `minimize` creates this rank's program.

        Raises:
            ValueError: it is not an optimizer, or `init` was not called.
            TypeError: the strategy is not a DistributedStrategy.
        """
        self._check_ready(optimizer)
        return CollectiveOptimizer(optimizer, strategy, self, self.take)

    def take(self, origin: Program, startup: Program, main: Any) -> None:
        """Receives the programs that `minimize` has created."""
        self._origin_program, self.startup_program, self.main_program = origin, startup, main

    # --- saving and loading ------------------------------------------------------------------

    def save_inference_model(
        self,
        executor: Executor,
        dirname: str,
        feeded_var_names: Sequence[str],
        target_vars: Sequence[Variable],
        main_program: Program | None = None,
        export_for_deployment: bool = True,
    ) -> None:
        """Saves the part of a program that computes targets from feeds; see `fluid.io`.

        Raises:
            AssertionError: the executor or the program is of the wrong type.
        """
        program = self._checked(executor, main_program)
        io.save_inference_model(
            dirname,
            feeded_var_names,
            target_vars,
            executor,
            program,
            export_for_deployment=export_for_deployment,
        )

    def save_persistables(
        self,
        executor: Executor,
        dirname: str,
        main_program: Program | None = None,
        filename: str | None = None,
    ) -> None:
        """Saves all persistable variables; see `fluid.io`.

        Raises:
            AssertionError: the executor or the program is of the wrong type.
        """
        program = self._checked(executor, main_program or self._ranks())
        io.save_persistables(executor, dirname, program, filename)

    def save_check_point(
        self,
        executor: Executor,
        path: str,
        train_status: TrainStatus,
        main_program: Program | None = None,
        fs: FS = _LOCAL,
        local_cache_path: str = _CACHE,
        remain_all_checkpoint: bool = True,
    ) -> None:
        """Writes the next checkpoint of a folder, on the first worker; others only report that.

        Args:
            executor: the training executor.
            path: the folder of all checkpoints.
            train_status: the progress of the training.
            main_program: the program whose variables are saved; this rank's, unless given.
            fs: the file system of the folder.
            local_cache_path: a local folder for files to upload.
            remain_all_checkpoint: keep older checkpoints.

        Raises:
            AssertionError: the executor or the program is of the wrong type.
            CheckpointError: it cannot be written; earlier checkpoints stay.
        """
        program = self._checked(executor, main_program or self._ranks())
        if self._is_initialized and not self.is_first_worker():  # two would write one folder
            warn_at_caller(f"worker {self.worker_index()} writes no checkpoint: the first one does")
            return

        def save(folder: Path) -> None:
            io.save_persistables(executor, folder, program, PARAMS)

        write_checkpoint(path, fs, local_cache_path, train_status, save)
        if not remain_all_checkpoint:
            self.clean_redundant_check_points(path, fs)

    def load_check_point(
        self,
        executor: Executor,
        path: str,
        trainer_id: int,
        main_program: Program | None = None,
        fs: FS = _LOCAL,
        local_cache_path: str = _CACHE,
        ignore_empty: bool = True,
    ) -> TrainStatus | None:
        """Restores the newest checkpoint; returns its progress, None without a checkpoint.

        `trainer_id` is the worker that loads, and `ignore_empty` accepts that there is no
        checkpoint. Other arguments are those of `save_check_point`.

        Raises:
            AssertionError: there is no checkpoint, and `ignore_empty` is False.
            SavedError: it is damaged, or of another program.
        """
        program = self._checked(executor, main_program or self._ranks())

        def load(folder: Path) -> None:
            io.load_persistables(executor, folder, program, PARAMS)

        found = read_checkpoint(path, fs, local_cache_path, trainer_id, load)
        if found is None and not ignore_empty:
            raise mistake(f"Can't find checkpoint in {path}", "save one first", AssertedError)
        return found

    def clean_redundant_check_points(
        self, root_path: str, fs: FS = _LOCAL, checkpoint_num: int = 1
    ) -> None:
        """Deletes all checkpoints of a folder but the newest, and remains of killed processes.

        Args:
            root_path: the folder.
            fs: its file system.
            checkpoint_num: the number to keep, at least 1.
        """
        for number in checkpoint_numbers(root_path, fs)[: -max(checkpoint_num, 1)]:
            fs.delete(f"{root_path}/{PREFIX}.{number}")
        for name in fs.list_dirs(root_path):
            if name.startswith(f"{PREFIX}.") and name.endswith(".tmp"):
                fs.delete(f"{root_path}/{name}")

    def _get_last_checkpoint_no(self, root_path: str, fs: FS = _LOCAL) -> int:
        """Returns the number of the newest checkpoint; -1 without any."""
        return max(checkpoint_numbers(root_path, fs), default=-1)

    def _ranks(self) -> Program | None:
        """Returns this rank's program, which may have more variables than the minimized one."""
        made = self.main_program
        program: Program | None = made.program if isinstance(made, CompiledProgram) else made
        return program

    def _checked(self, executor: Any, main_program: Any) -> Program:
        """Returns the checked program, by default the minimized one."""
        if not isinstance(executor, Executor):
            what = "In fleet's functions that save and load, executor must be as Executor type."
            raise mistake(what, f"not {executor!r}", AssertedError)
        program = self._origin_program if main_program is None else main_program
        if not isinstance(program, Program):
            what = "In fleet's functions that save and load, main_program must be as Program type."
            raise mistake(what, "call minimize first, or give the Program", AssertedError)
        return program


def _not_called(name: str) -> None:
    warnings.warn(f"You should not call '{name}' method for collective mode.", stacklevel=3)


fleet = Collective()
