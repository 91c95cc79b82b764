"""DistributedTranspiler: the fleet of parameter server jobs, and its optimizer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxfleet.errors import StrategyError, WrongTypeError
from jaxfleet.fluid import io
from jaxfleet.fluid.argument_checks import check_type, mistake, warn_no_effect
from jaxfleet.fluid.communicator import Communicator
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program, default_main_program, default_startup_program
from jaxfleet.fluid.framework.variable import Pairs, Variable
from jaxfleet.fluid.incubate.fleet.base.fleet_base import (
    DistributedOptimizer,
    Fleet,
    Mode,
    NoGrad,
    Parameters,
    check_saves,
    leave,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import (  # noqa: E501
    DistributedStrategy,
    strategy_of,
)
from jaxfleet.fluid.io.programs import save_for_use
from jaxfleet.fluid.transpiler import (
    DistributedMode,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    GeoSgdTranspiler,
)

TranspiledPrograms = Callable[[Any, Program, Program], None]  # makes a job's programs


class TranspilerOptimizer(DistributedOptimizer):
    """The optimizer that `fleet.distributed_optimizer` returns, which passes `transpile`.

    The strategy is one of `StrategyFactory`, or a transpiler's config, which is copied;
    `SyncStrategy` unless given.

    Raises:
        ValueError: it is given no optimizer.
        TypeError: the strategy is of another type.
    """

    def __init__(
        self,
        optimizer: Any,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        transpile: TranspiledPrograms | None = None,
    ) -> None:
        super().__init__(optimizer, strategy_of(strategy))
        self._transpile = transpile

    def minimize(
        self,
        loss: Variable,
        scopes: Any = None,
        startup_program: Program | None = None,
        parameter_list: Parameters | None = None,
        no_grad_set: NoGrad | None = None,
    ) -> tuple[list[Operator], Pairs]:
        """Adds gradients and updates, and creates this process's programs.

        These are `fleet.main_program` and `fleet.startup_program`. Arguments are those of
        `Optimizer.minimize`; `scopes` only warns: variables are in the scope of an Executor's run.

        Raises:
            TypeError: the loss or a program is a list.
            ValueError: the optimizer was not made by a fleet.
            ConnectError: a worker's wait for servers timed out.
        """
        if scopes is not None:
            warn_no_effect("minimize's scopes", "variables are in the scope that run is given")
        if isinstance(loss, list):
            what = "DistributedTranspiler's minimize can not accept loss with list"
            raise mistake(what, "give one loss", WrongTypeError)
        if isinstance(startup_program, list):
            what = "DistributedTranspiler's minimize can not accept program with list"
            raise mistake(what, "give one startup program", WrongTypeError)
        check_type(loss, "a loss", Variable)
        if self._transpile is None:
            what = "this optimizer belongs to no fleet, so its job has no programs"
            raise mistake(what, "use what fleet.distributed_optimizer returns", StrategyError)
        startup = startup_program or default_startup_program()
        made = self._optimizer.minimize(loss, startup, parameter_list, no_grad_set)
        self._transpile(self._strategy, loss.block.program, startup)
        return made


_MINIMIZE = "need invoke DistributedOptimizer.minimize first"


class DistributedTranspiler(Fleet):
    """A job whose parameters are on servers.

    `main_program` and `startup_program` are this process's, once `minimize` has run.
    """

    def __init__(self) -> None:
        super().__init__(Mode.TRANSPILER)
        # Programs once `minimize` has run; None for scripts that read them earlier.
        self.main_program: Any = None
        self.startup_program: Any = None
        self._origin_program: Program | None = None
        self._strategy: DistributedStrategy | None = None
        self._transpiler: DistributeTranspiler | None = None
        self._communicator: Communicator | None = None

    def distributed_optimizer(self, optimizer: Any, strategy: Any = None) -> TranspilerOptimizer:
        """Returns an optimizer whose `minimize` creates this process's programs.

        Raises:
            ValueError: it is not an optimizer, or `init` was not called.
            TypeError: the strategy is not as `TranspilerOptimizer` takes it.
        """
        self._check_ready(optimizer)
        return TranspilerOptimizer(optimizer, strategy, self._transpile)

    def _transpile(
        self, config: Any, main: Program | None = None, startup: Program | None = None
    ) -> None:
        """Creates this process's programs from the given, or default, main and startup programs.

        `config` is a strategy or a transpiler's config; TypeError for any other type.
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
            # A server may use the number of any trainer.
            number, here = self.server_index(), servers.split(",")[self.server_index()]
            number = min(number, workers - 1)
            made.transpile(number, main, servers, workers, said.sync_mode, startup, here)
            main, startup = made.get_pserver_programs(here)
        self._strategy, self._transpiler = strategy, made
        self.main_program, self.startup_program = main, startup

    def _train_alone(self, strategy: DistributedStrategy, main: Program, startup: Program) -> None:
        """Leaves programs unchanged, as this is the only process.

        Raises ValueError if there are other workers, but no servers.
        """
        if self.worker_num() > 1:
            what = f"{self.worker_num()} workers have no servers"
            hint = "name them, or take the fleet of fluid.incubate.fleet.collective"
            raise mistake(what, hint, StrategyError)
        self._strategy, self._transpiler = strategy, None
        self.main_program, self.startup_program = main, startup

    # --- workers -----------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Starts this process as a worker; the script runs its startup program.

        Prints the communicator's settings.

        Raises:
            ValueError: there is no program yet, or this process is a server.
        """
        program, strategy = self._program(), self._strategy
        self._check_works()
        if self._transpiler is None:
            return  # alone: there are no servers to connect to
        assert strategy is not None
        config = strategy.get_trainer_runtime_config()
        flags = config.get_communicator_flags()
        config.display(flags)
        assert strategy.mode is not None
        self._communicator = Communicator(program, strategy.mode, self._told(strategy), flags)
        self._communicator.start()

    def _told(self, strategy: DistributedStrategy) -> dict[str, Any]:
        """Returns the arguments of the mode's communicator."""
        if strategy.mode == DistributedMode.SYNC:
            return {"pserver_endpoints": self.server_endpoints(), "trainer_id": self.worker_index()}
        if isinstance(self._transpiler, GeoSgdTranspiler):
            return {
                "push_vars": self._transpiler._get_vars_info(),
                "trainers": self.worker_num(),
                "push_nums": strategy.get_program_config().geo_sgd_need_push_nums,
            }
        return {}

    def stop_worker(self) -> None:
        """Closes this worker, so that servers no longer wait for it. Repeated calls do nothing."""
        if self._communicator is not None:
            self._communicator.stop()
        servers = self.role_maker.get_pserver_endpoints()
        lines = self.executor._pserver.connections.find(servers) if servers else None
        if lines is not None:  # of any Executor that has trained
            lines.close()
        leave(self.role_maker)
        self.executor.close()

    # --- servers -----------------------------------------------------------------------------

    def init_server(self, model_dir: str | None = None) -> None:
        """Starts this process as a server, from a folder that a worker has saved if one is given.

        Raises:
            ValueError: there is no program yet, or no such folder, or this process is a worker.
            SavedError: a file is missing or damaged, or does not match the program.
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
            ConnectError: the endpoint is in use, or cannot be bound.
        """
        program = self._program()
        self._check_serves()
        self.executor.run(program)

    # --- saving ------------------------------------------------------------------------------

    def save_inference_model(
        self,
        executor: Executor,
        dirname: str,
        feeded_var_names: Sequence[str],
        target_vars: Sequence[Variable],
        main_program: Program | None = None,
        export_for_deployment: bool = True,
    ) -> None:
        """Saves the part of a program that computes targets from feeds, with servers' parameters.

        A given `main_program`, whose variables are all in this process, is saved unchanged. Other
        arguments are those of `fluid.io.save_inference_model`.

        Raises:
            TypeError: an argument is of another type; compiled programs are not accepted.
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
        """Saves all persistable variables, including those that only servers hold.

        The program is a worker's, this one's unless given. Servers must see the folder if there are
        tables of rows.

        Raises:
            TypeError: an argument is of another type; compiled programs are not accepted.
            ValueError: the program does not belong to a job.
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
