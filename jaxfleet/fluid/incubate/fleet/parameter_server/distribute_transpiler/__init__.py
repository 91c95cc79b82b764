"""The fleet of jobs with parameter servers.

::

    from jaxfleet.fluid.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
    from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler import fleet

    fleet.init(PaddleCloudRoleMaker())
    fleet.distributed_optimizer(fluid.optimizer.SGD(0.1)).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        exe.run(fleet.startup_program)
        ...  # steps of fleet.main_program
        fleet.stop_worker()
"""

from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.transpiler_fleet import (
    DistributedTranspiler as DistributedTranspiler,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.transpiler_fleet import (
    TranspilerOptimizer as TranspilerOptimizer,
)
from jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler.transpiler_fleet import (
    fleet as fleet,
)
