"""What a transpilation is asked for: DistributeTranspilerConfig, under fluid's names."""

import difflib
from typing import Any

from jaxfleet.env import rpc_threads
from jaxfleet.errors import FieldError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.transpiler.ps_dispatcher import PSDispatcher

_FIELDS = (
    *("slice_var_up", "split_method", "min_block_size", "enable_dc_asgd", "mode", "print_log"),
    *("wait_port", "half_async", "completely_not_async", "geo_sgd_mode"),
    *("geo_sgd_need_push_nums", "nccl_comm_num", "use_hierarchical_allreduce"),
    *("hierarchical_allreduce_inter_nranks", "hierarchical_allreduce_exter_nranks"),
    "collective_mode",
)
LEAST_BLOCK_SIZE = 8192  # elements: fluid's, which its own rule does not need


class DistributedMode:
    """How servers take gradients, as fluid counts it in `listen_and_serv`."""

    SYNC = 0
    ASYNC = 1
    HALF_ASYNC = 2
    GEO = 3


class DistributeTranspilerConfig:
    """Says how a program is transpiled.

    Attributes:
        slice_var_up: cut parameters in blocks of rows, so that each server holds some.
        split_method: which server gets which block: a subclass of `PSDispatcher`; RoundRobin
            unless given.
        min_block_size: the fewest elements of a block; at least 8192.
        enable_dc_asgd: compensate late gradients; asynchronous only.
        mode: `pserver`, `nccl2` or `collective`.
        print_log: print where each block of a parameter goes; `JAXFLEET_DUMP_DIR` has what each
            pass did written.
        wait_port: wait until servers listen before a trainer's program is handed out.
        half_async: wait in a step until what was sent has gone.
        completely_not_async: merge gradients of all trainers, though programs are asynchronous.
        geo_sgd_mode: train on trainers, and exchange what has changed.
        geo_sgd_need_push_nums: steps between two exchanges.
        nccl_comm_num: rings of all-reduces.
        use_hierarchical_allreduce: reduce within machines, then between them.
        hierarchical_allreduce_inter_nranks: ranks of a machine; 0 for as many as it has devices.
        hierarchical_allreduce_exter_nranks: warned of: 1.5's; the groups follow from the size of
            one.
        collective_mode: `grad_allreduce`, `local_sgd` or `single_process_multi_thread`.
    """

    def __init__(self) -> None:
        self.slice_var_up = True
        self.split_method: type[PSDispatcher] | None = None
        self.min_block_size = LEAST_BLOCK_SIZE
        self.enable_dc_asgd = False
        self.mode = "pserver"
        self.print_log = False
        self.wait_port = True
        self.half_async = False
        self.completely_not_async = False
        self.geo_sgd_mode = False
        self.geo_sgd_need_push_nums = 100
        self.nccl_comm_num = 1
        self.use_hierarchical_allreduce = False
        self.hierarchical_allreduce_inter_nranks = 0
        self.hierarchical_allreduce_exter_nranks = 0
        self.collective_mode: str | None = None
        self._runtime_split_send_recv = False
        self._sync_mode = True

    def __setattr__(self, name: str, value: Any) -> None:
        known = name.startswith("_") or hasattr(type(self), name) or name in _FIELDS
        if not known:
            near = difflib.get_close_matches(name, [*_FIELDS, "sync_mode"])
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_FIELDS)}"
            what = f"DistributeTranspilerConfig has no field '{name}'"
            raise mistake(what, hint, FieldError)
        if name == "hierarchical_allreduce_exter_nranks" and value:
            reason = "how many groups there are follows from hierarchical_allreduce_inter_nranks"
            warn_no_effect(f"DistributeTranspilerConfig.{name}", reason)
        super().__setattr__(name, value)

    @property
    def runtime_split_send_recv(self) -> bool:
        """Whether what sends and receives cuts and joins blocks, and no operators do.

        Raises:
            ValueError: on setting: None, or True while `sync_mode` is.
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
            ValueError: on setting: None, or True while `runtime_split_send_recv` is.
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
    """How many threads fluid's servers had; taken, and nothing here needs it."""

    def __init__(self) -> None:
        self._rpc_send_thread_num = rpc_threads("send")
        self._rpc_get_thread_num = rpc_threads("get")
        self._rpc_prefetch_thread_num = rpc_threads("prefetch")
