"""Execution of programs: distributed steps, executors and scopes."""

from jaxfleet.runtime.devices import emulate_devices as emulate_devices
from jaxfleet.runtime.distribution import distribute as distribute
from jaxfleet.runtime.equivalence import verify as verify
from jaxfleet.runtime.executor import Executor as Executor
from jaxfleet.runtime.memory_passes import memory_optimize as memory_optimize
from jaxfleet.runtime.memory_passes import release_memory as release_memory
from jaxfleet.runtime.pserver_entry import ServerStep as ServerStep
from jaxfleet.runtime.remote_state import Handle as Handle
from jaxfleet.runtime.scope import Scope as Scope
from jaxfleet.runtime.simulated_job import Twin as Twin
from jaxfleet.runtime.step import Step as Step
from jaxfleet.runtime.strategy import DistributedStrategy as DistributedStrategy
from jaxfleet.runtime.trainer_step import TrainerStep as TrainerStep
