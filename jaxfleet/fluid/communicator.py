"""The communicator of fluid's asynchronous trainers, and its settings.

In fluid a thread of the communicator sends and receives, so that the executor's threads need not
wait. Here a run of a trainer's program sends its gradients and receives the servers' values,
equivalent to a communicator that sends each gradient alone and receives after each. So this class
only records the participants and the mode; its settings are checked and stored, and do not affect
results.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from jaxfleet.env import preset_flag, read_cpu_num
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.transpiler.config import DistributedMode

_OWN = "CPU_NUM"  # the number of devices of the CPU
DEFAULTS = {
    "communicator_max_merge_var_num": _OWN,
    "communicator_send_queue_size": _OWN,
    "communicator_independent_recv_thread": "1",
    "communicator_min_send_grad_num_before_recv": _OWN,
    "communicator_thread_pool_size": "5",
    "communicator_send_wait_times": "5",
    "communicator_is_sgd_optimizer": "1",
}
_IN_STEP = ("communicator_max_merge_var_num", "communicator_send_queue_size")
_OF_A_STEP = (*_IN_STEP, "communicator_send_wait_times", "communicator_thread_pool_size")
_KEYS = {
    DistributedMode.SYNC: _OF_A_STEP,
    DistributedMode.ASYNC: tuple(DEFAULTS),
    DistributedMode.HALF_ASYNC: _OF_A_STEP,
    DistributedMode.GEO: ("communicator_thread_pool_size", "communicator_send_wait_times"),
}
_NEEDS = {
    DistributedMode.SYNC: ("pserver_endpoints", "trainer_id"),
    DistributedMode.GEO: ("push_vars", "trainers", "push_nums"),
}


def get_communicator_flags(mode: int, given: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Returns the settings that apply in a mode, as text; fluid's values unless given.

    `FLAGS_<name>` in the environment overrides the default. If trainers or their threads wait for
    each other, the numbers of merged and queued gradients equal that of the CPU's devices.

    Raises:
        ProgramError: there is no such mode or setting.
    """
    if mode not in _KEYS:
        raise mistake(f"there is no mode {mode!r}", "take one of DistributedMode")
    unknown = [name for name in given or {} if name not in DEFAULTS]
    if unknown:
        what = f"a communicator has no setting '{unknown[0]}'"
        raise mistake(what, f"there are {', '.join(DEFAULTS)}")
    own = str(read_cpu_num() or 1)
    found = {
        name: preset_flag(name) or (own if DEFAULTS[name] == _OWN else DEFAULTS[name])
        for name in _KEYS[mode]
    }
    found |= {name: str(value) for name, value in (given or {}).items() if name in found}
    if mode in {DistributedMode.SYNC, DistributedMode.HALF_ASYNC}:
        for name in _IN_STEP:
            if found[name] != own:
                warnings.warn(f"{name} is {own}, as CPU_NUM is, not {found[name]}", stacklevel=2)
                found[name] = own
    return found


class Communicator:
    """Marks a trainer's program as part of a job that does not wait at every step.

    Args:
        program: the trainer's; its `recv` operators are marked as the communicator's.
        mode: a member of `DistributedMode`.
        kwargs: the arguments of the mode: `pserver_endpoints` and `trainer_id` of SYNC;
            `push_vars`, `trainers` and `push_nums` of GEO.
        envs: settings; see `get_communicator_flags`.

    Raises:
        ProgramError: an argument of the mode is missing, or a setting is unknown.
    """

    def __init__(
        self,
        program: Program,
        mode: int,
        kwargs: Mapping[str, Any] | None = None,
        envs: Mapping[str, Any] = {},  # fluid's default; it is not changed
    ) -> None:
        check_type(program, "program", Program)
        self.mode, self.kwargs = mode, dict(kwargs or {})
        self.envs = get_communicator_flags(mode, {n: v for n, v in envs.items() if n in DEFAULTS})
        missing = [name for name in _NEEDS.get(mode, ()) if name not in self.kwargs]
        if missing:
            what = f"a communicator of mode {mode} needs {', '.join(missing)}"
            raise mistake(what, "give them in kwargs")
        for op in program.global_block().ops:
            if op.type == "recv":
                op._set_attr("do_not_run", True)
        self._is_running = False

    def start(self) -> None:
        """Starts; a second call has no effect except a warning."""
        if self._is_running:
            warnings.warn("the communicator is running already", stacklevel=2)
        self._is_running = True

    def stop(self) -> None:
        """Stops; values sent by runs are at the servers already."""
        self._is_running = False

    def is_running(self) -> bool:
        return self._is_running
