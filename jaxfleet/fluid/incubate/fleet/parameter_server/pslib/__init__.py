"""pslib's jobs: several losses and sparse tables, described by a strategy.

`DownpourOptimizer` is what `fleet.distributed_optimizer` returns in pslib's fleet.
"""

from jaxfleet.fluid.fleet_rows import fleet_embedding as fleet_embedding
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib.jobs import PSLib as PSLib
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib.jobs import fleet as fleet
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib.node import (
    DownpourServer as DownpourServer,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib.node import (
    DownpourWorker as DownpourWorker,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib.optimizer import (
    DistributedAdam as DistributedAdam,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib.optimizer import (
    DownpourOptimizer as DownpourOptimizer,
)
