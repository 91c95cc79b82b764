"""The communicator of fluid's asynchronous trainers, and its settings.

In fluid a thread of the communicator sends and receives, since the executor's threads were not to
wait. Here a run of a trainer's program sends what it made and receives what servers have: what a
communicator does that sends each gradient alone and receives after each. So this class says who
takes part, and when; its settings are checked and kept, and change nothing that is computed.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from jaxfleet.env import preset_flag, read_cpu_num
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.transpiler.config import DistributedMode

_OWN = "CPU_NUM"  # as many as the CPU stands for devices
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
    """Returns the settings that count in a mode, as text.

    `FLAGS_<name>` in the environment goes before the default. Where trainers or their threads wait
    for each other, as many gradients are merged, and queued, as the CPU stands for devices.

    Args:
        mode: of `DistributedMode`.
        given: settings by name; what is not given is what fluid has.

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
    """Says that a trainer's program takes part in a job that does not wait at every step.

    Args:
        program: the trainer's; its `recv` operators are marked as the communicator's.
        mode: of `DistributedMode`.
        kwargs: what the mode needs: `pserver_endpoints` and `trainer_id` of SYNC; `push_vars`,
            `trainers` and `push_nums` of GEO.
        envs: settings; see `get_communicator_flags`.

    Raises:
        ProgramError: something that the mode needs is not given, or is none of its settings.
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
        """Begins; a second time changes nothing, with a warning."""
        if self._is_running:
            warnings.warn("the communicator is running already", stacklevel=2)
        self._is_running = True

    def stop(self) -> None:
        """Ends; what runs have sent is at the servers already."""
        self._is_running = False

    def is_running(self) -> bool:
        """Tells whether it was started and not stopped."""
        return self._is_running
