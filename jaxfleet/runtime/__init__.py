"""Execution of programs: distributed steps, executors and scopes.

What belongs to jobs with servers is imported on first access: other steps need no `jaxfleet.ps`.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jaxfleet.runtime.devices import emulate_devices as emulate_devices
from jaxfleet.runtime.distribution import distribute as distribute
from jaxfleet.runtime.executor import Executor as Executor
from jaxfleet.runtime.scope import Scope as Scope
from jaxfleet.runtime.step import Step as Step
from jaxfleet.runtime.step_state import Handle as Handle
from jaxfleet.runtime.training_step import TrainingStep as TrainingStep
from jaxfleet.runtime.transpile import memory_optimize as memory_optimize
from jaxfleet.runtime.transpile import release_memory as release_memory
from jaxfleet.strategy import DistributedStrategy as DistributedStrategy

if _TYPE_CHECKING:
    from jaxfleet.runtime.pserver_entry import ServerStep as ServerStep
    from jaxfleet.runtime.simulated_job import Twin as Twin
    from jaxfleet.runtime.trainer_step import TrainerStep as TrainerStep
    from jaxfleet.runtime.verification import verify as verify

_HOME_OF = {
    "ServerStep": "pserver_entry",
    "TrainerStep": "trainer_step",
    "Twin": "simulated_job",
    "verify": "verification",
}


def __getattr__(name: str) -> _Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
