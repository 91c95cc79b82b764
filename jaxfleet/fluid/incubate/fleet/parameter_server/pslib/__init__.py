"""`jaxfleet.contrib.downpour.pslib` at Paddle's path.

pslib's jobs have several losses and sparse tables, described by a strategy. `DownpourOptimizer` is
the result of `fleet.distributed_optimizer` in pslib's fleet.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from jaxfleet.fluid.lazy_modules import forward as _forward

if _TYPE_CHECKING:
    from jaxfleet.contrib.downpour.pslib import DistributedAdam as DistributedAdam
    from jaxfleet.contrib.downpour.pslib import DownpourOptimizer as DownpourOptimizer
    from jaxfleet.contrib.downpour.pslib import DownpourServer as DownpourServer
    from jaxfleet.contrib.downpour.pslib import DownpourWorker as DownpourWorker
    from jaxfleet.contrib.downpour.pslib import PSLib as PSLib
    from jaxfleet.contrib.downpour.pslib import fleet as fleet
    from jaxfleet.contrib.downpour.pslib import fleet_embedding as fleet_embedding

__getattr__, __dir__ = _forward(__name__, "jaxfleet.contrib.downpour.pslib")
