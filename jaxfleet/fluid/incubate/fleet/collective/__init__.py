"""The fleet of ranks that train together without servers.

::

    from jaxfleet.fluid.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
    from jaxfleet.fluid.incubate.fleet.collective import DistributedStrategy, fleet

    fleet.init(PaddleCloudRoleMaker(is_collective=True))
    fleet.distributed_optimizer(fluid.optimizer.SGD(0.1), DistributedStrategy()).minimize(loss)
    exe.run(fleet.startup_program)
    exe.run(fleet.main_program, feed=..., fetch_list=[loss])
"""

from jaxfleet.fluid.incubate.fleet.collective.checkpoints import TrainStatus as TrainStatus
from jaxfleet.fluid.incubate.fleet.collective.collective_fleet import Collective as Collective
from jaxfleet.fluid.incubate.fleet.collective.collective_fleet import fleet as fleet
from jaxfleet.fluid.incubate.fleet.collective.optimizer import (
    CollectiveOptimizer as CollectiveOptimizer,
)
from jaxfleet.fluid.incubate.fleet.collective.optimizer import DistFCConfig as DistFCConfig
from jaxfleet.fluid.incubate.fleet.collective.optimizer import (
    DistributedStrategy as DistributedStrategy,
)
from jaxfleet.fluid.incubate.fleet.collective.optimizer import LambConfig as LambConfig
