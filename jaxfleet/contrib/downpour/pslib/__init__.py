"""pslib's jobs: several losses and sparse tables, described by a strategy.

`DownpourOptimizer` is what `fleet.distributed_optimizer` returns in pslib's fleet.
"""

from jaxfleet.contrib.downpour.pslib.node import DownpourServer as DownpourServer
from jaxfleet.contrib.downpour.pslib.node import DownpourWorker as DownpourWorker
from jaxfleet.contrib.downpour.pslib.optimizer import DistributedAdam as DistributedAdam
from jaxfleet.contrib.downpour.pslib.optimizer import DownpourOptimizer as DownpourOptimizer
from jaxfleet.contrib.downpour.pslib.pslib_fleet import PSLib as PSLib
from jaxfleet.contrib.downpour.pslib.pslib_fleet import fleet as fleet
from jaxfleet.fluid.layers.nn import fleet_embedding as fleet_embedding
