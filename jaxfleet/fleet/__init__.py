"""Facade for jobs of several processes: roles, training steps and checkpoints.

The functions act on the job of this process; `JobFleet` documents them::

    from jaxfleet import fleet

    fleet.init()
    tx = fleet.distributed_optimizer(optax.adam(1e-3))
    step = fleet.distribute(train_step, example=(state, batch))
"""

from jaxfleet.cluster.roles.base import OnlyWorker as OnlyWorker
from jaxfleet.fleet.base import FleetBase as FleetBase
from jaxfleet.fleet.job import JobFleet as JobFleet

_FLEET = JobFleet()

init = _FLEET.init
is_first_worker = _FLEET.is_first_worker
worker_index = _FLEET.worker_index
worker_num = _FLEET.worker_num
is_worker = _FLEET.is_worker
is_server = _FLEET.is_server
server_index = _FLEET.server_index
server_num = _FLEET.server_num
worker_endpoints = _FLEET.worker_endpoints
server_endpoints = _FLEET.server_endpoints
split_files = _FLEET.split_files
all_reduce_worker = _FLEET.all_reduce_worker
barrier_worker = _FLEET.barrier_worker
distributed_optimizer = _FLEET.distributed_optimizer
distribute = _FLEET.distribute
run_server = _FLEET.run_server
save = _FLEET.save
restore = _FLEET.restore
stop_worker = _FLEET.stop_worker
