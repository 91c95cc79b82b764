"""Compiles a one-device JAX training program into a distributed one.

::

    import jaxfleet as jf

    tx = jf.distributed_optimizer(optax.adam(1e-3))
    step = jf.distribute(train_step, example=(state, batch), strategy="collective")
    state, metrics = step(state, batch)
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from jaxfleet import fleet as fleet
from jaxfleet import tables as tables
from jaxfleet.capture import Captured as Captured
from jaxfleet.capture import capture as capture
from jaxfleet.capture import distributed_optimizer as distributed_optimizer
from jaxfleet.capture import embedding_table as embedding_table
from jaxfleet.group import initialize as initialize
from jaxfleet.group import is_first as is_first
from jaxfleet.group import rank as rank
from jaxfleet.group import size as size
from jaxfleet.group import split_files as split_files
from jaxfleet.runtime import DistributedStrategy as DistributedStrategy
from jaxfleet.runtime import Executor as Executor
from jaxfleet.runtime import Scope as Scope
from jaxfleet.runtime import Step as Step
from jaxfleet.runtime import Twin as Twin
from jaxfleet.runtime import distribute as distribute
from jaxfleet.runtime import emulate_devices as emulate_devices
from jaxfleet.runtime import memory_optimize as memory_optimize
from jaxfleet.runtime import release_memory as release_memory
from jaxfleet.runtime import verify as verify

try:
    __version__ = _version("jaxfleet")
except _PackageNotFoundError:  # a checkout that was never installed
    __version__ = "unknown"
