"""Jobs of several processes: who each is, and what a script calls.

The functions are about the job that this process is of; see `JobFleet` for what they do::

    from jaxfleet import fleet

    fleet.init()
    tx = fleet.distributed_optimizer(optax.adam(1e-3))
    step = fleet.distribute(train_step, example=(state, batch))
"""

from jaxfleet.fleet.base import FleetBase as FleetBase
from jaxfleet.fleet.job import JobFleet as JobFleet
from jaxfleet.fleet.only_worker import OnlyWorker as OnlyWorker
from jaxfleet.fleet.this_process import all_reduce_worker as all_reduce_worker
from jaxfleet.fleet.this_process import barrier_worker as barrier_worker
from jaxfleet.fleet.this_process import distribute as distribute
from jaxfleet.fleet.this_process import distributed_optimizer as distributed_optimizer
from jaxfleet.fleet.this_process import init as init
from jaxfleet.fleet.this_process import is_first_worker as is_first_worker
from jaxfleet.fleet.this_process import is_server as is_server
from jaxfleet.fleet.this_process import is_worker as is_worker
from jaxfleet.fleet.this_process import restore as restore
from jaxfleet.fleet.this_process import run_server as run_server
from jaxfleet.fleet.this_process import save as save
from jaxfleet.fleet.this_process import server_endpoints as server_endpoints
from jaxfleet.fleet.this_process import server_index as server_index
from jaxfleet.fleet.this_process import server_num as server_num
from jaxfleet.fleet.this_process import split_files as split_files
from jaxfleet.fleet.this_process import stop_worker as stop_worker
from jaxfleet.fleet.this_process import worker_endpoints as worker_endpoints
from jaxfleet.fleet.this_process import worker_index as worker_index
from jaxfleet.fleet.this_process import worker_num as worker_num
