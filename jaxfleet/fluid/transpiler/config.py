"""DistributeTranspilerConfig, and checks of a transpiler's arguments."""

import difflib
from collections.abc import Sequence
from typing import Any

from jaxfleet.env import rpc_threads
from jaxfleet.errors import AssertedError, FieldError
from jaxfleet.fluid.argument_checks import check_type, mistake, warn_no_effect
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.transpiler.ps_dispatcher import PSDispatcher, RoundRobin

LEAST_BLOCK_SIZE = 8192  # elements: fluid's limit, which its own slicing rule does not need


class DistributedMode:
    """How servers apply gradients, as fluid numbers it in `listen_and_serv`."""

    SYNC = 0
    ASYNC = 1
    HALF_ASYNC = 2
    GEO = 3


class DistributeTranspilerConfig:
    """Options of a transpiler.

    Examples:
        >>> from jaxfleet import fluid
        >>> config = fluid.DistributeTranspilerConfig()
        >>> config.slice_var_up = False
        >>> transpiler = fluid.DistributeTranspiler(config)
    """

    slice_var_up: bool = True  # cut parameters into blocks of rows, so that each server holds some
    split_method: type[PSDispatcher] | None = None  # assigns blocks to servers; None: RoundRobin
    min_block_size: int = LEAST_BLOCK_SIZE  # the fewest elements of a block; at least 8192
    enable_dc_asgd: bool = False  # compensate late gradients; asynchronous only
    mode: str = "pserver"  # or `nccl2`, `collective`
    # Print the server of each block of a parameter; JAXFLEET_DUMP_DIR dumps what each pass makes.
    print_log: bool = False
    wait_port: bool = True  # wait until servers listen before returning a trainer's program
    half_async: bool = False  # wait within a step until its sends have completed
    # Merge gradients of all trainers, though programs are asynchronous.
    completely_not_async: bool = False
    geo_sgd_mode: bool = False  # update on trainers, and exchange deltas
    geo_sgd_need_push_nums: int = 100  # steps between exchanges
    nccl_comm_num: int = 1  # rings of all-reduces
    use_hierarchical_allreduce: bool = False  # reduce within machines, then between them
    hierarchical_allreduce_inter_nranks: int = 0  # ranks of a machine; 0: its number of devices
    hierarchical_allreduce_exter_nranks: int = 0  # warns: 1.5's; it follows from the field above
    # `grad_allreduce`, `local_sgd` or `single_process_multi_thread`
    collective_mode: str | None = None
    _runtime_split_send_recv: bool = False
    _sync_mode: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            known = DistributeTranspilerConfig.__annotations__  # a subclass may add none
            fields = [field for field in known if not field.startswith("_")]
            near = difflib.get_close_matches(name, [*fields, "sync_mode"])
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}"
            what = f"DistributeTranspilerConfig has no field '{name}'"
            raise mistake(what, hint, FieldError)
        if name == "hierarchical_allreduce_exter_nranks" and value:
            reason = "how many groups there are follows from hierarchical_allreduce_inter_nranks"
            warn_no_effect(f"DistributeTranspilerConfig.{name}", reason)
        super().__setattr__(name, value)

    @property
    def runtime_split_send_recv(self) -> bool:
        """Whether the communication layer, not operators, cuts and joins blocks.

        Raises:
            ValueError: set to None, or to True while `sync_mode` is True.
        """
        return self._runtime_split_send_recv

    @runtime_split_send_recv.setter
    def runtime_split_send_recv(self, value: bool | None) -> None:
        if value is None:
            raise mistake("config.runtime_split_send_recv is set to None", "give True or False")
        if value and self._sync_mode:
            what = "runtime_split_send_recv cannot be true while sync_mode is"
            raise mistake(what, "set config.sync_mode = False first")
        self._runtime_split_send_recv = value

    @property
    def sync_mode(self) -> bool:
        """Whether servers wait for the gradients of all trainers.

        Raises:
            ValueError: set to None, or to True while `runtime_split_send_recv` is True.
        """
        return self._sync_mode

    @sync_mode.setter
    def sync_mode(self, value: bool | None) -> None:
        if value is None:
            raise mistake("config.sync_mode is set to None", "give True or False")
        if value and self._runtime_split_send_recv:
            what = "sync_mode cannot be true while runtime_split_send_recv is"
            raise mistake(what, "set config.runtime_split_send_recv = False first")
        self._sync_mode = value


class ServerRuntimeConfig:
    """The numbers of threads of fluid's servers; accepted without effect."""

    def __init__(self) -> None:
        self._rpc_send_thread_num = rpc_threads("send")
        self._rpc_get_thread_num = rpc_threads("get")
        self._rpc_prefetch_thread_num = rpc_threads("prefetch")


def check_config(config: Any) -> None:
    """Checks the types, the block size and the dispatcher of a config."""
    check_type(config, "config", DistributeTranspilerConfig)
    if config.min_block_size < LEAST_BLOCK_SIZE:
        what = f"min_block_size is {config.min_block_size}, and is at least {LEAST_BLOCK_SIZE}"
        raise mistake(what, "fluid's limit; jf.distribute knows none", AssertedError)
    method = config.split_method or RoundRobin
    if not (isinstance(method, type) and issubclass(method, PSDispatcher)):
        what = f"split_method is {method!r}, and must derive from PSDispatcher"
        raise mistake(what, "give the class, not an object of it", AssertedError)


def check_new(program: Any, what: str) -> None:
    """Raises ProgramError if a program is of the wrong type or already transpiled."""
    check_type(program, what, Program)
    if "role" in program._facts:
        role = program._facts["role"]
        hint = "build it anew, or transpile a clone made before"
        raise mistake(f"{what} was transpiled before, as a {role}'s", hint)


def trainers_of(trainers: Any, trainer_id: Any) -> int:
    """Returns the number of trainers; ProgramError if it or the trainer id is invalid."""
    if isinstance(trainers, bool) or not isinstance(trainers, int) or trainers < 1:
        what = f"trainers is {trainers!r}, and with servers a number of at least 1"
        raise mistake(what, "config.mode = 'nccl2' takes endpoints")
    if not isinstance(trainer_id, int) or not 0 <= trainer_id < trainers:
        what = f"trainer_id is {trainer_id!r}, and there are {trainers} trainers"
        raise mistake(what, "number them from 0")
    return trainers


def endpoints_of(pservers: Any) -> tuple[str, ...]:
    """Returns the endpoints of servers; WrongTypeError if they are not one string."""
    hint = "give them with commas between: '10.0.0.1:6174,10.0.0.2:6174'"
    check_type(pservers, "pservers", str, hint)
    return tuple(name.strip() for name in pservers.split(","))


def rank_endpoints(trainers: str | Sequence[str]) -> list[str]:
    """Returns the distinct endpoints of ranks from a list or a comma-separated string."""
    given = trainers.split(",") if isinstance(trainers, str) else trainers
    endpoints = [endpoint.strip() for endpoint in given]
    for place, endpoint in enumerate(endpoints):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise mistake(f"'{endpoint}' is no endpoint", "spell it host:port")
        if endpoint in endpoints[:place]:
            raise mistake(f"two ranks have the endpoint {endpoint}", "give each its own")
    return endpoints


def check_among(current: str, endpoints: Sequence[str]) -> None:
    """Raises ProgramError if a process is not among the endpoints."""
    if current not in endpoints:
        what = f"current_endpoint is {current}, which none of {', '.join(endpoints)} is"
        raise mistake(what, "spell it as in trainers")
