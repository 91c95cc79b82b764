"""Starts the processes of a job on one machine, or one machine's of several; ends them all."""

from jaxfleet.launch.collective import launch_ranks as launch_ranks
from jaxfleet.launch.job import PORT_TAKEN as PORT_TAKEN
from jaxfleet.launch.job import CollectiveJob as CollectiveJob
from jaxfleet.launch.job import Job as Job
from jaxfleet.launch.launcher import launch as launch
from jaxfleet.launch.nodes import Nodes as Nodes
