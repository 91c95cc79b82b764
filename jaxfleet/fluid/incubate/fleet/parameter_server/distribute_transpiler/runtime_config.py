"""TrainerRuntimeConfig: the settings of a trainer's communicator, by name."""

from collections.abc import Mapping
from typing import Any

from jaxfleet.env import read_cpu_num
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.communicator import DEFAULTS, get_communicator_flags
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.transpiler import DistributedMode

_UNUSED = {"rpc_deadline": "180000", "rpc_retry_times": "3"}  # FLAGS_rpc_deadline is what acts
_REASON = (
    "gradients are sent when a step has made them, and the transport sets its own threads and "
    "retries; FLAGS_rpc_deadline limits how long a step waits"
)


class TrainerRuntimeConfig:
    """Settings of a communicator, which are checked and kept; see `fluid.communicator`.

    Attributes:
        mode: of `DistributedMode`; a strategy says it.
        num_threads: as many as the CPU stands for devices (`CPU_NUM`).
        runtime_configs: by name, as they were set.
    """

    def __init__(self) -> None:
        self.mode: int | None = None
        self.num_threads = str(read_cpu_num() or 1)
        self.runtime_configs: dict[str, str] = {
            **get_communicator_flags(DistributedMode.ASYNC),
            **_UNUSED,
        }

    def set(self, name: str, value: Any) -> None:
        """Changes a setting, with a warning where it is another than before.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self.runtime_configs:
            what = f"TrainerRuntimeConfig doesn't have key: {name}"
            raise mistake(what, f"there are {', '.join(self.runtime_configs)}")
        if str(value) != self.runtime_configs[name]:
            warn_no_effect(f"TrainerRuntimeConfig's {name}", _REASON)
        self.runtime_configs[name] = str(value)

    def get_communicator_flags(self) -> dict[str, str]:
        """Returns the settings that count in the mode, as text.

        Raises:
            ValueError: no strategy has said the mode.
        """
        if self.mode is None:
            what = "the runtime config has no mode"
            raise mistake(what, "take the one of a strategy: get_trainer_runtime_config()")
        given = {k: v for k, v in self.runtime_configs.items() if k in DEFAULTS}
        return get_communicator_flags(self.mode, given)

    def display(self, configs: Mapping[str, str]) -> None:
        """Prints settings, one a line."""
        width = max(map(len, configs), default=0)
        rows = [f"  {name:{width}}  {value}" for name, value in configs.items()]
        print("communicator:", *rows, sep="\n")  # noqa: T201  # as fluid does
