"""DistributeTranspiler: converts a program to those of trainers and servers.

::

    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(trainer_id, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=4)
    if role == "PSERVER":
        main, startup = transpiler.get_pserver_programs(current_endpoint)
    else:
        main = transpiler.get_trainer_program()

It contains no rewrite. The program is converted to the IR and rewritten by the passes for captured
JAX steps (`pserver_job.py` selects them), and the result is written back atomically into the
script's programs.
"""

from collections.abc import Iterator
from typing import Any

from jaxfleet.analysis.placement.sliced_layout import placement_of, slices_of
from jaxfleet.errors import AssertedError, StrategyError, UnknownServerError, UnsupportedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.distribute_lookup_table import find_distributed_lookup_table
from jaxfleet.fluid.framework.from_ir import Rewritten, write_back
from jaxfleet.fluid.framework.operator import NAME_SCOPE, ROLE, ROLE_VAR, OpRole
from jaxfleet.fluid.framework.program import Program, default_main_program, default_startup_program
from jaxfleet.fluid.transpiler.collective import (
    group_size,
    note_levels,
    note_trainers,
    transpiler_of,
)
from jaxfleet.fluid.transpiler.config import (
    DistributedMode,
    DistributeTranspilerConfig,
    ServerRuntimeConfig,
    check_among,
    check_config,
    check_new,
    endpoints_of,
    rank_endpoints,
    trainers_of,
)
from jaxfleet.fluid.transpiler.details.program_utils import wait_server_ready
from jaxfleet.fluid.transpiler.job_attributes import JobAttributes
from jaxfleet.fluid.transpiler.ps_dispatcher import RoundRobin
from jaxfleet.fluid.transpiler.pserver_job import PServerJob
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import GenNcclId

LOOKUP_TABLE_TYPE = "lookup_table"
LOOKUP_TABLE_GRAD_TYPE = "lookup_table_grad"
OP_NAME_SCOPE = NAME_SCOPE
CLIP_OP_NAME_SCOPE = "@CLIP"
OP_ROLE_VAR_ATTR_NAME = ROLE_VAR
RPC_OP_ROLE_ATTR_NAME = op_role_attr_name = ROLE
OPT_OP_ROLE_ATTR_VALUE = OpRole.OPTIMIZE
RPC_OP_ROLE_ATTR_VALUE = OpRole.RPC
DIST_OP_ROLE_ATTR_VALUE = OpRole.DIST
LR_SCHED_OP_ROLE_ATTR_VALUE = OpRole.LR_SCHED

MODES = ("pserver", "nccl2", "collective")
_DEFAULT_ENDPOINT = "127.0.0.1:6174"


class DistributeTranspiler(JobAttributes):
    """Transpiles a program for parameter servers, or for ranks that reduce gradients.

    Raises:
        AssertionError: the config's block size is below 8192, or its dispatcher does not derive
            from `PSDispatcher`.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     y = fluid.layers.fc(fluid.data("x", [None, 4]), 1, bias_attr=False, param_attr="w")
        ...     updates = fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(y))
        ...     transpiler = fluid.DistributeTranspiler()
        ...     transpiler.transpile(0, pservers="ps0:6174", trainers=2)
        >>> trainer = transpiler.get_trainer_program(wait_port=False)
        >>> [op.type for op in trainer.global_block().ops][-4:]
        ['send', 'send_barrier', 'recv', 'fetch_barrier']
        >>> server = transpiler.get_pserver_program("ps0:6174")
        >>> [op.type for op in server.global_block().ops]
        ['listen_and_serv']
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        self.config = DistributeTranspilerConfig() if config is None else config
        self.server_config = ServerRuntimeConfig()
        self._job: PServerJob | None = None
        self._main: Program | None = None
        check_config(self.config)
        if self.config.split_method is None:
            self.config.split_method = RoundRobin

    @property
    def distributed_mode(self) -> int:
        """How servers apply gradients, as fluid numbers it: a member of `DistributedMode`."""
        if self.config.sync_mode or self.config.completely_not_async:
            return DistributedMode.SYNC
        is_split = self.config.runtime_split_send_recv
        return DistributedMode.ASYNC if is_split else DistributedMode.HALF_ASYNC

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = _DEFAULT_ENDPOINT,
        trainers: int | str = 1,
        sync_mode: bool = True,
        startup_program: Program | None = None,
        current_endpoint: str = _DEFAULT_ENDPOINT,
        *,
        workers: int | str | None = None,
    ) -> None:
        """Rewrites a program and its startup program, in place, for one process of a job.

        Args:
            trainer_id: the number of this trainer, from 0.
            program: the step; the default main program unless given.
            pservers: `host:port` of every server, separated by commas.
            trainers: the number of trainers; in modes without servers, `host:port` of each.
            sync_mode: servers wait for the gradients of all trainers.
            startup_program: initializes the step; the default startup program unless given.
            current_endpoint: this process's own.
            workers: another name of `trainers`, used in some documents.

        Raises:
            ProgramError: the program was transpiled before or updates nothing, or the arguments are
                not valid in the mode.
            AssertionError: in nccl2 mode, the trainers are not a string or cannot be grouped.
            ConnectError: other processes do not listen in time.
        """
        trainers = trainers if workers is None else workers
        main = default_main_program() if program is None else program
        startup = default_startup_program() if startup_program is None else startup_program
        if self.config.mode not in MODES:
            what = f"config.mode is '{self.config.mode}'"
            raise mistake(what, f"choose one of {', '.join(MODES)}", StrategyError)
        check_new(main, "the program")
        check_new(startup, "the startup program")
        self.origin_startup_program = startup.clone()
        self.origin_program, self.startup_program = main, startup
        wait = self.config.wait_port
        if self.config.mode == "pserver":
            self._for_servers(
                trainer_id, main, startup, pservers, trainers, sync_mode, current_endpoint
            )
        elif self.config.mode == "nccl2":
            self._transpile_nccl2(trainer_id, trainers, current_endpoint, startup, wait)
            note_trainers(main, self.config, str(trainers))
        else:
            mode = self.config.collective_mode
            self._transpile_collective(
                mode, trainer_id, trainers, current_endpoint, startup, main, wait
            )
            note_levels(main, self.config)

    def _transpile_nccl2(
        self,
        trainer_id: int,
        trainers: Any,
        current_endpoint: str,
        startup_program: Program | None = None,
        wait_port: bool = True,
    ) -> None:
        """Adds the processes that train together to the startup program.

        Its first run joins and waits for the others, so `wait_port` is ignored. Sets a config's
        `hierarchical_allreduce_inter_nranks` up to 1 to the number of this process's devices.

        Raises:
            AssertionError: the trainers are not a string, or cannot be grouped.
            ValueError: there is no such trainer.
        """
        del wait_port
        config = self.config
        if not isinstance(trainers, str):
            what = f"trainers is a string of endpoints in nccl2 mode, not {trainers!r}"
            raise mistake(what, "join them: ','.join(endpoints)", AssertedError)
        if trainer_id < 0:
            raise mistake(f"trainer_id is {trainer_id}", "trainers count from 0")
        endpoints = rank_endpoints(trainers)
        check_among(current_endpoint, endpoints)
        if config.use_hierarchical_allreduce:
            config.hierarchical_allreduce_inter_nranks = group_size(config, len(endpoints))
        tell = GenNcclId(
            tuple(endpoints),
            trainer_id,
            config.nccl_comm_num,
            config.use_hierarchical_allreduce,
            config.hierarchical_allreduce_inter_nranks,
        )
        startup = startup_program or default_startup_program()
        Rewritten.of(startup, [tell], name="startup").write_back()

    def _transpile_collective(
        self,
        collective_mode: Any,
        trainer_id: int,
        trainers: Any,
        current_endpoint: str,
        startup_program: Program | None = None,
        main_program: Program | None = None,
        wait_port: bool = True,
    ) -> None:
        """Rewrites both programs for ranks that train together without servers.

        Raises:
            ValueError: there is no such mode, or as `Collective.transpile`.
        """
        transpiler = transpiler_of(collective_mode, self.config.nccl_comm_num)
        if not isinstance(trainers, str | list | tuple):
            what = f"trainers is {trainers!r}, and in this mode the endpoints of all ranks"
            raise mistake(what, "trainers='host:port,host:port'")
        transpiler.transpile(
            startup_program, main_program, trainer_id, trainers, current_endpoint, wait_port
        )

    def _for_servers(
        self,
        trainer_id: int,
        main: Program,
        startup: Program,
        pservers: str,
        trainers: int | str,
        sync_mode: bool,
        current_endpoint: str,
    ) -> None:
        if any(op.type == "dgc" for op in main.global_block().ops):
            what = "DGCMomentumOptimizer trains over collectives, and servers have none"
            raise mistake(what, "fluid.optimizer.Momentum", UnsupportedError)
        count, endpoints = trainers_of(trainers, trainer_id), endpoints_of(pservers)
        is_sync = sync_mode and self.config.sync_mode
        job = self._job_of(
            main=main.clone(),
            startup=startup.clone(),
            config=self.config,
            endpoints=endpoints,
            trainers=count,
            is_sync=is_sync,
        )
        table = find_distributed_lookup_table(main)
        trainer = job.trainer(trainer_id)
        begun = job.trainer_startup(trainer)
        self._job, self._main = job, main
        write_back(main, trainer)
        write_back(startup, begun, origin=job.main)
        self.vars_overview = registry = job.registry()
        self._describe(job, main, trainer_id, table)
        if self.config.print_log:
            print(*_log(job), sep="\n")  # noqa: T201  # requested
        for each in (main, startup):
            each._is_distributed = True
            each._is_chief = trainer_id == 0
            each._endpoints = list(endpoints)
            each._ps_endpoint = current_endpoint
            each._distributed_lookup_table = table
            each._parameters_on_pservers = registry

    def _job_of(self, **job: Any) -> PServerJob:
        """Returns the builder of the job's programs, of the given fields."""
        return PServerJob(**job)

    # --- programs of processes ---------------------------------------------------------------

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """Returns the trainer's program, which is the transpiled one.

        Waits until all servers listen, unless `wait_port` or the config disables it.

        Raises:
            ConnectError: a server does not listen in time.
        """
        job, main = self._transpiled()
        if wait_port and self.config.wait_port:
            wait_server_ready(list(job.endpoints))
        return main

    def get_pserver_program(self, endpoint: str) -> Program:
        """Returns a server's program, a new one at each call.

        Raises:
            KeyError: no server has this endpoint.
            AssertionError: delay compensation is requested in synchronous mode.
        """
        return self._written(endpoint, self._server(endpoint))

    def _server(self, endpoint: str) -> IrProgram:
        job, _ = self._transpiled()
        if self.config.enable_dc_asgd and job.is_sync:
            what = "enable_dc_asgd is for servers that do not wait: there are no late gradients"
            raise mistake(what, "transpile with sync_mode=False", AssertedError)
        _check_server(endpoint, job)
        return job.server(endpoint)

    def _written(self, endpoint: str, server: IrProgram) -> Program:
        """Converts a server's program for scripts."""
        job, main = self._transpiled()
        made = write_back(Program(), server, origin=job.main)
        made.random_seed = job.main.random_seed
        self._say_threads(made)
        made._copy_dist_param_info_from(main)
        made._ps_endpoint = endpoint
        return made

    def _say_threads(self, server: Program) -> None:
        """Records the number of threads of fluid's server; ours chooses by itself."""
        (serve,) = server.global_block().ops
        for what in ("send", "get", "prefetch"):
            name = f"rpc_{what}_thread_num"
            serve._set_attr(name, getattr(self.server_config, f"_{name}"))

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """Returns a server's program and its startup program."""
        server = self._server(endpoint)
        job, _ = self._transpiled()
        return self._written(endpoint, server), _begun(job, server, job.startup)

    def get_startup_program(
        self,
        endpoint: str,
        pserver_program: Program | None = None,
        startup_program: Program | None = None,
    ) -> Program:
        """Returns a server's startup program, made from that of the step.

        `startup_program` initializes the step; the transpiled one, unless given.

        Raises:
            KeyError: no server has this endpoint.
        """
        del pserver_program
        job, _ = self._transpiled()
        _check_server(endpoint, job)
        is_rewritten = startup_program is None or bool(startup_program._facts)
        begins = job.startup if is_rewritten else startup_program
        assert begins is not None
        return _begun(job, job.server(endpoint), begins)

    def _set_server_config(self, server_config: ServerRuntimeConfig | None = None) -> None:
        """Sets the numbers of threads of servers.

        Raises TypeError if the argument is not a `ServerRuntimeConfig`.
        """
        chosen = ServerRuntimeConfig() if server_config is None else server_config
        check_type(chosen, "server_config", ServerRuntimeConfig)
        self.server_config = chosen

    def _transpiled(self) -> tuple[PServerJob, Program]:
        if self._job is None or self._main is None:
            hint = "call transpile(..., pservers=...) first, with config.mode = 'pserver'"
            raise mistake("no program was transpiled for servers", hint)
        return self._job, self._main


def _begun(job: PServerJob, server: IrProgram, begins: Program) -> Program:
    """Returns a server's startup program for scripts."""
    made = job.server_startup(server, begins)
    program = write_back(Program(), made, origin=job.startup)
    program.random_seed = begins.random_seed
    return program


def _log(job: PServerJob) -> Iterator[str]:
    """Yields a line with the server of each block of a parameter."""
    placement = placement_of(job.placed)
    for cut in slices_of(job.placed):
        yield f"{cut.name}: {list(cut.shape)} of '{cut.param}' on {placement[cut.name]}"


def _check_server(endpoint: str, job: PServerJob) -> None:
    if endpoint not in job.endpoints:
        hint = f"the servers are {', '.join(job.endpoints)}"
        raise mistake(f"there is no server '{endpoint}'", hint, UnknownServerError)
