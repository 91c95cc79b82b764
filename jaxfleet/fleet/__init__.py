"""Facade for jobs of several processes: roles, training steps and checkpoints.

The functions act on the job of this process; `JobFleet` documents them::

    from jaxfleet import fleet

    fleet.init()
    tx = fleet.distributed_optimizer(optax.adam(1e-3))
    step = fleet.distribute(train_step, example=(state, batch))
"""

from jaxfleet.cluster.roles.base import OnlyWorker as OnlyWorker
from jaxfleet.fleet.base import FleetBase as FleetBase
from jaxfleet.fleet.default_fleet import all_reduce_worker as all_reduce_worker
from jaxfleet.fleet.default_fleet import barrier_worker as barrier_worker
from jaxfleet.fleet.default_fleet import distribute as distribute
from jaxfleet.fleet.default_fleet import distributed_optimizer as distributed_optimizer
from jaxfleet.fleet.default_fleet import init as init
from jaxfleet.fleet.default_fleet import is_first_worker as is_first_worker
from jaxfleet.fleet.default_fleet import is_server as is_server
from jaxfleet.fleet.default_fleet import is_worker as is_worker
from jaxfleet.fleet.default_fleet import restore as restore
from jaxfleet.fleet.default_fleet import run_server as run_server
from jaxfleet.fleet.default_fleet import save as save
from jaxfleet.fleet.default_fleet import server_endpoints as server_endpoints
from jaxfleet.fleet.default_fleet import server_index as server_index
from jaxfleet.fleet.default_fleet import server_num as server_num
from jaxfleet.fleet.default_fleet import split_files as split_files
from jaxfleet.fleet.default_fleet import stop_worker as stop_worker
from jaxfleet.fleet.default_fleet import worker_endpoints as worker_endpoints
from jaxfleet.fleet.default_fleet import worker_index as worker_index
from jaxfleet.fleet.default_fleet import worker_num as worker_num
from jaxfleet.fleet.job import JobFleet as JobFleet
