"""Launcher: starts a job's processes on this machine, and ends them all."""

from jaxfleet.launch.job_spec import PORT_TAKEN as PORT_TAKEN
from jaxfleet.launch.job_spec import CollectiveJob as CollectiveJob
from jaxfleet.launch.job_spec import Job as Job
from jaxfleet.launch.job_spec import Nodes as Nodes
from jaxfleet.launch.pserver_launch import launch as launch
from jaxfleet.launch.rank_launch import launch_ranks as launch_ranks
