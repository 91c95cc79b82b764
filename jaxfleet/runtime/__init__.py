"""Runs programs: distributed steps, executors and scopes."""

from jaxfleet.runtime.devices import emulate_devices as emulate_devices
from jaxfleet.runtime.distributing import distribute as distribute
from jaxfleet.runtime.executor import Executor as Executor
from jaxfleet.runtime.handles import Handle as Handle
from jaxfleet.runtime.processes import ServerStep as ServerStep
from jaxfleet.runtime.reuse import memory_optimize as memory_optimize
from jaxfleet.runtime.reuse import release_memory as release_memory
from jaxfleet.runtime.scope import Scope as Scope
from jaxfleet.runtime.step import Step as Step
from jaxfleet.runtime.strategy import DistributedStrategy as DistributedStrategy
from jaxfleet.runtime.trainer_step import TrainerStep as TrainerStep
from jaxfleet.runtime.twin import Twin as Twin
from jaxfleet.runtime.verify import verify as verify
