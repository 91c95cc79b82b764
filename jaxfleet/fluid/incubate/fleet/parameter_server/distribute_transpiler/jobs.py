"""DistributedTranspiler: the fleet of jobs with parameter servers, by DistributeTranspiler."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfleet.errors import StrategyError
from jaxfleet.fluid import io
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.communicator import Communicator
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.incubate.fleet.base.fleet_base import (
    Fleet,
    Mode,
    check_optimizer,
    check_saves,
    leave,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import (  # noqa: E501
    DistributedStrategy,
    strategy_of,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.optimizer import (
    TranspilerOptimizer,
)
from jaxfleet.fluid.io.trained import save_for_use
from jaxfleet.fluid.program import Program, default_main_program, default_startup_program
from jaxfleet.fluid.transpiler import (
    DistributedMode,
    DistributeTranspiler,
    GeoSgdTranspiler,
)
from jaxfleet.fluid.variable import Variable

_MINIMIZE = "need invoke DistributedOptimizer.minimize first"
_INIT = (
    "use fleet.init(role) to initialize the role of current node before optimizer.minimize(loss)"
)


class DistributedTranspiler(Fleet):
    """A job whose parameters are on servers.

    Attributes:
        main_program: what this process runs, after `minimize`.
        startup_program: what begins it.
    """

    def __init__(self) -> None:
        super().__init__(Mode.TRANSPILER)
        # A Program each, once there are; None is for scripts that ask before.
        self.main_program: Any = None
        self.startup_program: Any = None
        self._origin_program: Program | None = None
        self._strategy: DistributedStrategy | None = None
        self._transpiler: DistributeTranspiler | None = None
        self._communicator: Communicator | None = None

    def distributed_optimizer(self, optimizer: Any, strategy: Any = None) -> TranspilerOptimizer:
        """Returns an optimizer whose `minimize` makes this process's programs.

        Args:
            optimizer: a script's own.
            strategy: see `TranspilerOptimizer`.

        Raises:
            ValueError: it is no optimizer, or `init` was not called.
            TypeError: the strategy is none.
        """
        check_optimizer(optimizer)
        if not self._is_initialized:
            raise mistake(_INIT, kind=StrategyError)
        return TranspilerOptimizer(optimizer, strategy, self._transpile)

    def _transpile(
        self, config: Any, main: Program | None = None, startup: Program | None = None
    ) -> None:
        """Makes this process's programs.

        Args:
            config: a strategy or a transpiler's config.
            main: the program that trains; the default one unless given.
            startup: what begins it, as that.

        Raises:
            TypeError: the config is none.
        """
        strategy = strategy_of(config)
        main, startup = main or default_main_program(), startup or default_startup_program()
        said = strategy.get_program_config()
        made = GeoSgdTranspiler(said) if said.geo_sgd_mode else DistributeTranspiler(said)
        made._set_server_config(strategy.get_server_runtime_config())
        self._origin_program = main.clone()
        if not self.server_num():
            self._train_alone(strategy, main, startup)
            return
        servers, workers = self.server_endpoints(to_string=True), self.worker_num()
        assert isinstance(servers, str)
        if self.is_worker():
            made.transpile(self.worker_index(), main, servers, workers, said.sync_mode, startup)
            main = made.get_trainer_program(wait_port=said.wait_port)
        else:
            # Which trainer a server is does not matter, but that it is one of them.
            number, here = self.server_index(), servers.split(",")[self.server_index()]
            number = min(number, workers - 1)
            made.transpile(number, main, servers, workers, said.sync_mode, startup, here)
            main, startup = made.get_pserver_programs(here)
        self._strategy, self._transpiler = strategy, made
        self.main_program, self.startup_program = main, startup

    def _train_alone(self, strategy: DistributedStrategy, main: Program, startup: Program) -> None:
        """Leaves programs as they are: this is the only process.

        Raises:
            ValueError: there are other workers, and no servers.
        """
        if self.worker_num() > 1:
            what = f"{self.worker_num()} workers have no servers"
            hint = "name them, or take the fleet of fluid.incubate.fleet.collective"
            raise mistake(what, hint, StrategyError)
        self._strategy, self._transpiler = strategy, None
        self.main_program, self.startup_program = main, startup

    # --- what a worker does ------------------------------------------------------------------

    def init_worker(self) -> None:
        """Begins to be a worker; its startup program is run by the script.

        Prints the communicator's settings.

        Raises:
            ValueError: there is no program yet, or this process is a server.
        """
        program, strategy = self._program(), self._strategy
        self._check_works()
        if self._transpiler is None:
            return  # alone: nobody is to be spoken with
        assert strategy is not None
        config = strategy.get_trainer_runtime_config()
        flags = config.get_communicator_flags()
        config.display(flags)
        assert strategy.mode is not None
        self._communicator = Communicator(program, strategy.mode, self._told(strategy), flags)
        self._communicator.start()

    def _told(self, strategy: DistributedStrategy) -> dict[str, Any]:
        """Returns what the communicator of a mode is told."""
        if strategy.mode == DistributedMode.SYNC:
            return {
                "pserver_endpoints": self.server_endpoints(),
                "trainer_id": self.worker_index(),
            }
        if isinstance(self._transpiler, GeoSgdTranspiler):
            return {
                "push_vars": self._transpiler._get_vars_info(),
                "trainers": self.worker_num(),
                "push_nums": strategy.get_program_config().geo_sgd_need_push_nums,
            }
        return {}

    def stop_worker(self) -> None:
        """Ends being a worker: servers wait for it no longer. Again, it does nothing."""
        if self._communicator is not None:
            self._communicator.stop()
        servers = self.role_maker.get_pserver_endpoints()
        lines = self.executor._pserver.connections.find(servers) if servers else None
        if lines is not None:  # whichever Executor has trained
            lines.close()
        leave(self.role_maker)
        self.executor.close()

    # --- what a server does ------------------------------------------------------------------

    def init_server(self, model_dir: str | None = None) -> None:
        """Begins to be a server.

        Args:
            model_dir: where a worker has saved what the job goes on from.

        Raises:
            ValueError: there is no program yet, or no such folder, or this process is a worker.
            SavedError: something is missing there, is damaged, or does not fit.
        """
        if self.startup_program is None:
            what = f"startup_program is None, {_MINIMIZE}"
            raise mistake(what, kind=StrategyError)
        self._check_serves()
        self.executor.run(self.startup_program)
        if model_dir:
            if not Path(model_dir).is_dir():
                what = f"There is no directory named '{model_dir}'"
                raise mistake(what, "that of fleet.save_persistables, which all servers see")
            io.load_persistables(self.executor, model_dir, self._program())

    def run_server(self) -> None:
        """Serves until all workers have stopped.

        Raises:
            ValueError: there is no program yet, or this process is a worker.
            ConnectError: the endpoint is taken, or may not be bound.
        """
        program = self._program()
        self._check_serves()
        self.executor.run(program)

    # --- what is kept ------------------------------------------------------------------------

    def save_inference_model(
        self,
        executor: Executor,
        dirname: str,
        feeded_var_names: Sequence[str],
        target_vars: Sequence[Variable],
        main_program: Program | None = None,
        export_for_deployment: bool = True,
    ) -> None:
        """Saves what computes some targets from what is fed, with parameters as servers have them.

        Args:
            executor: the one that trains.
            dirname: the folder.
            feeded_var_names: what will be fed.
            target_vars: what will be fetched.
            main_program: a program whose variables are all in this process, which is saved as it
                is; the one that was given to `minimize`, unless given.
            export_for_deployment: False saves the whole program.

        Raises:
            TypeError: an argument is of another type: a compiled program is none.
            ValueError: there is no program yet.
        """
        check_saves(executor, main_program)
        if main_program is None and self._transpiler is None:
            main_program = self._origin_program
        if main_program is not None:
            io.save_inference_model(
                dirname,
                feeded_var_names,
                target_vars,
                executor,
                main_program,
                export_for_deployment=export_for_deployment,
            )
            return
        program = self._program()
        assert self._origin_program is not None
        save_for_use(
            dirname,
            feeded_var_names,
            target_vars,
            executor,
            self._origin_program,
            trained=program,
            export_for_deployment=export_for_deployment,
        )

    def save_persistables(
        self, executor: Executor, dirname: str, main_program: Program | None = None
    ) -> None:
        """Saves all that outlives a run, what servers alone hold included.

        Args:
            executor: the one that trains.
            dirname: the folder; for tables of rows, one that servers see.
            main_program: a worker's; this one's unless given.

        Raises:
            TypeError: an argument is of another type: a compiled program is none.
            ValueError: the program is no job's.
        """
        check_saves(executor, main_program)
        program = self._program() if main_program is None else main_program
        if not program._is_distributed and (main_program or self._transpiler):
            what = "main_program is for local, may not use fleet.save_persistables"
            raise mistake(what, "fluid.io.save_persistables saves it")
        io.save_persistables(executor, dirname, program)

    def _program(self) -> Program:
        if self.main_program is None:
            raise mistake(f"main_program is None, {_MINIMIZE}", kind=StrategyError)
        program: Program = self.main_program
        return program


fleet = DistributedTranspiler()
