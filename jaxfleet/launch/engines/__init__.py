"""Jobs for schedulers of clusters, which start the launch of a job on every machine."""

from jaxfleet.launch.engines.request import Request as Request
from jaxfleet.launch.engines.request import Resources as Resources
from jaxfleet.launch.engines.request import any_machines as any_machines
from jaxfleet.launch.engines.slurm import Batch as Batch
from jaxfleet.launch.engines.slurm import batch_script as batch_script
from jaxfleet.launch.engines.slurm import submit as submit
