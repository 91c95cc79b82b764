"""Starts the processes of a job on one machine, and ends them all."""

from jaxfleet.launch.job import PORT_TAKEN as PORT_TAKEN
from jaxfleet.launch.job import Job as Job
from jaxfleet.launch.launcher import launch as launch
